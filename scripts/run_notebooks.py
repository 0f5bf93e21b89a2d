"""Whether the notebooks run from the first cell to the last: python scripts/run_notebooks.py [NOTEBOOK ...]

They are committed without outputs, and are not written here: what the cells print is printed.
"""

import sys
from pathlib import Path

import nbformat
from jupyter_client import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    kernel = KernelManager(transport="ipc")
    NotebookClient(notebook, kernel, timeout=600, resources={"metadata": {"path": ROOT}}).execute()
    kernel.shutdown_kernel(now=True)
    print(f"== {path.relative_to(ROOT)}")
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            print(output.get("text", ""), end="")


for each in [Path(name).resolve() for name in sys.argv[1:]] or sorted(ROOT.glob("notebooks/*.ipynb")):
    run(each)
