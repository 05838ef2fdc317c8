"""Run, check and render the notebooks: ``python -m ci.notebooks --help``.

``execute`` runs a notebook with papermill, ``pairs`` keeps each .ipynb equal to its .py,
``gallery`` writes HTML pages. Notebooks are ``notebooks/NN_name.{py,ipynb}``.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
