"""FSx for Lustre: create file systems, link them to S3, check access, hydrate and measure.

On AWS, `requests` builds and validates requests, `service` sends them, and `access_checks` checks
that a job can reach its file systems. On a machine that has mounted one, `lustre` inspects the
mount, `hydrate` restores files from S3, and `throughput` measures read rates. Sources of rules and
names: the user guide and API reference of Amazon FSx for Lustre, 2026-11.
"""
