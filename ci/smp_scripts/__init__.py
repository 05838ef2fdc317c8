"""Run public scripts for SMP on nearlinear, and compare them with a table of expectations.

The scripts are not in this repository: ``--scripts`` names a folder that contains them. Run
``python -m ci.smp_scripts --help``.
"""
