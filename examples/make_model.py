"""Makes the model that all examples train: 1 M parameters, untrained, one token for each character. Takes a second.

.venv/bin/python examples/make_model.py [FOLDER]        # default: runs/example-model
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipelinerl.demo.sort_digits import make_model

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example-model")
    make_model(folder, seed=0)
    print(folder)
