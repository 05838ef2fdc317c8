"""A race: all its contestants on one cluster, a step of each in turn."""

from __future__ import annotations

from ci.cluster import Cluster

from . import table
from .plan import Plan
from .teams import Team, teams_of


def race(plan: Plan, timelines: bool = False) -> list[dict]:
    """Every turn's record, warm-up too; ``timelines``: one more turn of each, with its spans.

    Raises ClusterError, PeerMissing, RankFailed.
    """
    turns = []
    with Cluster(plan.nodes, plan.rate) as cluster:
        teams = [Team(cluster, plan, names) for names in teams_of(plan.contestants)]
        for team in teams:
            team.await_ready()
        team_of = {name: team for team in teams for name in team.names}
        for step in range(plan.warm_up + plan.steps + timelines):
            traced = step == plan.warm_up + plan.steps
            for name in plan.contestants:
                turn = team_of[name].turn(name, step, traced)
                timed = step >= plan.warm_up and not traced
                turns.append({**turn, "timed": timed})
                print(table.line(turns[-1]), flush=True)
        for team in teams:
            team.end()
    return turns
