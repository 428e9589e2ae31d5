"""``python -m disagg`` is ``disagg``."""

from __future__ import annotations

from disagg.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
