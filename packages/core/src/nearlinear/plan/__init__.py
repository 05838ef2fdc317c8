"""Know before you pay: what a config needs and how fast it goes, before any rank is started.

``hardware`` is data, ``workload`` what a config asks for; ``compute`` and ``links`` say how long
its pieces take, ``step`` and ``pipelines`` lay them out on ``streams``. ``published`` runs are what
``parameters`` are fitted to and ``validate`` checks against. `nearlinear.plan` is a module that can
be called: ``nl.plan("run.toml", "p4d.24xlarge:32")`` is `answer.plan`.
"""

import sys
import types


class _Plan(types.ModuleType):
    """This module, which answers when it is called."""

    def __call__(self, *arguments, **keywords):
        from .answer import plan

        return plan(*arguments, **keywords)


sys.modules[__name__].__class__ = _Plan
