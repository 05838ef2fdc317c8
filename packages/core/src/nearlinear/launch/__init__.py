"""Where a job runs. Here: the ranks of this machine, through torchrun's own API."""
