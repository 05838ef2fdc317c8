"""Expert parallelism: divide the experts of a mixture over ranks and dispatch tokens to them."""
