"""Whether two runs took the same first step: compare.py alone.json ranks.json [tolerance]."""

import json
import sys
from pathlib import Path


def main() -> int:
    alone, ranks = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    tolerance, same = float(dict(enumerate(sys.argv)).get(3, 1e-4)), True
    print(f"\n{'first step':>14}  {'one process':>12}  {'all ranks':>12}  {'difference':>10}")
    for name in ("loss", "gradient norm"):
        difference = abs(ranks[name] - alone[name]) / abs(alone[name])
        same = same and difference < tolerance
        print(f"{name:>14}  {alone[name]:>12.6f}  {ranks[name]:>12.6f}  {difference:>10.1e}")
    peaks = (f"{run['peak memory']:>8.2f} GiB" for run in (alone, ranks))
    print(f"{'peak memory':>14}  {'  '.join(peaks)}  (of a rank)")
    print(f"{'the same step' if same else 'NOT THE SAME STEP'} (tolerance {tolerance:g} relative)")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
