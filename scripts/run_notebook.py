"""Run a notebook's code cells in this process and store what they print and draw; no Jupyter.

    python scripts/run_notebook.py docs/speculation.ipynb
    python scripts/run_notebook.py docs/speculation.ipynb --check

Cells have to print and to call ``plt.show()``: a bare last expression shows nothing here. Pictures
are stored small and without a date, so that the same cells give the same file. ``--check`` writes
nothing, and exits with 1 where what is printed is not what is stored.
"""

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

DPI = 72


def execute(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run all code cells from top to bottom in one namespace; return the outputs of each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    found: list[list[dict[str, Any]]] = []
    shown: list[dict[str, Any]] = []

    def show(*_: object, **__: object) -> None:
        for number in plt.get_fignums():
            figure = plt.figure(number)
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=DPI, metadata={"Software": None})
            picture = base64.b64encode(data.getvalue()).decode()
            size = "x".join(f"{each:g}" for each in figure.get_size_inches())
            content = {"image/png": picture, "text/plain": [f"<figure, {size} inches>"]}
            shown.append({"output_type": "display_data", "data": content, "metadata": {}})
        plt.close("all")

    before, plt.show = plt.show, show
    try:
        for number, cell in enumerate(code_cells(notebook), start=1):
            shown.clear()
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            text = printed.getvalue().splitlines(keepends=True)
            stream = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
            found.append([*stream, *shown])
    finally:
        plt.show = before
        plt.close("all")
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(outputs: list[dict[str, Any]]) -> str:
    """Return the text of a cell's outputs."""
    return "".join("".join(each.get("text", [])) for each in outputs)


def differing(notebook: dict[str, Any], outputs: list[list[dict[str, Any]]]) -> list[str]:
    """Return where what came differs from what is stored: texts, and how many pictures."""
    wrong = []
    for number, (cell, came) in enumerate(zip(code_cells(notebook), outputs, strict=True), start=1):
        if printed(cell["outputs"]) != printed(came):
            wrong.append(f"cell {number} prints something else than is stored")
        if len(cell["outputs"]) != len(came):
            wrong.append(f"cell {number}: {len(came)} outputs, {len(cell['outputs'])} stored")
    return wrong


def main() -> None:
    """Run, and store or compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    notebook = json.loads(arguments.notebook.read_text())
    outputs = execute(notebook)
    if arguments.check:
        if wrong := differing(notebook, outputs):
            raise SystemExit("\n".join(wrong))
        return
    for number, (cell, came) in enumerate(zip(code_cells(notebook), outputs, strict=True), start=1):
        cell["outputs"], cell["execution_count"] = came, number
    arguments.notebook.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
