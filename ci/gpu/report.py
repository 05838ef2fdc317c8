from .runner import ROOT
PAGE = ROOT / "packages/core/docs/gpu_evidence.md"
def format_stages(stages): return ""
def render(folder): return ""
