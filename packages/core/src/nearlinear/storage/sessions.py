"""Sessions of boto3 that read what it knows of AWS's services once in a process, not one by one.

A service's description is read when its first client is made: a second for EC2's, a quarter for
S3's. boto3 keeps it for the session.
"""

import functools


def session(region: str = ""):
    """A new session; the environment's region unless one is named.

    Raises ImportError without boto3, and botocore's BotoCoreError where settings cannot be read.
    """
    import boto3.session
    import botocore.session

    core = botocore.session.get_session()
    core.register_component("data_loader", _descriptions(core.get_config_variable("data_path")))
    return boto3.session.Session(botocore_session=core, region_name=region or None)


@functools.cache
def _descriptions(path: str | None):
    """botocore's loader; ``path``: AWS_DATA_PATH, where it looks before its own folder."""
    from botocore.loaders import create_loader

    return create_loader(path)
