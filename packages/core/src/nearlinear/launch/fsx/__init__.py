"""FSx for Lustre: file systems made, linked to S3 and checked, and looked at from where they are
mounted.

On AWS `wish` says what to ask for and `service` asks, `check` holds a job against what is there.
Mounted, `mount` says what a folder is on, `lfs` speaks to Lustre, `hydrate` brings files from S3
and `throughput` measures. Source of rules and names: Amazon FSx for Lustre's user guide and API
reference, 2026-11.
"""
