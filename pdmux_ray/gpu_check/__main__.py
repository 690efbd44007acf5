"""`python -m pdmux_ray.gpu_check`: the same as `pdmux gpu-check`, with fewer packages."""

from __future__ import annotations

import argparse
import sys

from pdmux_ray.errors import PdmuxError
from pdmux_ray.gpu_check.command import add_gpu_check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.gpu_check")
    add_gpu_check(parser)
    args = parser.parse_args()
    try:
        return int(args.run(args))
    except PdmuxError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
