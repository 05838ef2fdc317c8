"""Ranks, meshes, process groups and communication threads; consensus, heartbeats and watchdog."""
