from __future__ import annotations

import subprocess
import sys


def test_importing_the_module_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, pdmux_ray.text.tokenizer, pdmux_ray.text.stream; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
