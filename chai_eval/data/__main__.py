"""`python -m chai_eval.data` fetches everything a first run needs."""

from __future__ import annotations

import sys

from chai_eval.data.assets import fetch, is_fetched
from chai_eval.data.documents import DOCUMENTS
from chai_eval.errors import RunError
from chai_eval.models.embedded import SMOLLM2


def main() -> int:
    """Fetch both assets; 0 when they are there, 1 and one line on stderr when they aren't."""
    for asset in (DOCUMENTS, SMOLLM2):
        there = is_fetched(asset)
        try:
            folder = fetch(asset)
        except RunError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{asset.distribution} {asset.version}: {folder}{' (already there)' if there else ''}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
