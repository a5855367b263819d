"""Tables of step times for `--april-cpu-pace`; bench/pace.py writes them."""

from pathlib import Path

TABLES = Path(__file__).parent
