"""`pdmux role`: which instances a running server has, and another role for one of them."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any

from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.types import Role

API_KEY_VARIABLE = "PDMUX_API_KEY"
ANSWER_S = 30.0
_COLUMNS = ("id", "role", "running", "waiting", "trouble")


class RoleError(PdmuxError):
    """The server cannot be asked, or has refused."""


def add_role(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Without arguments lists the instances of a server with their roles. With an instance and a role, changes it: its "
        "requests go on, its weights and cached prefixes stay, and new requests are routed by the new role at once."
    )
    parser.add_argument("instance", nargs="?", metavar="INSTANCE", help="its id, or a beginning of it that only one has")
    parser.add_argument("role", nargs="?", choices=[role.value for role in Role], metavar="ROLE", help="prefill, mux or decode")
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="of the server; default %(default)s")
    text = f"default: ${API_KEY_VARIABLE}"
    parser.add_argument("--api-key", default=os.environ.get(API_KEY_VARIABLE), metavar="KEY", help=text)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.instance is not None and args.role is None:
        raise ConfigError("give an instance and its new role, or neither of them")
    instances = _ask(args.url, "/admin/instances", args.api_key)
    if args.instance is not None:
        body = {"instance": _named(args.instance, instances), "role": args.role}
        instances = _ask(args.url, "/admin/role", args.api_key, body)
    rows = [_COLUMNS, *([str(each[name]) for name in _COLUMNS] for each in instances)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _named(beginning: str, instances: list[dict[str, Any]]) -> str:
    found = [each["id"] for each in instances if each["id"].startswith(beginning)]
    if len(found) != 1:
        ids = ", ".join(each["id"] for each in instances) or "none"
        raise ConfigError(f"{len(found)} instances have an id that begins with {beginning!r}; there are: {ids}")
    return str(found[0])


def _ask(url: str, path: str, key: str | None, body: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The instances, as the server lists them. Raises RoleError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url.rstrip("/") + path, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return list(json.load(answer)["instances"])
    except urllib.error.HTTPError as error:
        raise RoleError(f"{url} answers HTTP {error.code}: {_message(error.read())}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoleError(f"{url} cannot be asked ({error}): is it a server of pdmux-ray, and does it run?") from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
