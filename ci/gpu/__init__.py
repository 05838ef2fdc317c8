"""Run every check that one GPU allows: ``python -m ci.gpu``, from a bare checkout, offline."""
