"""A process that uses an SQLite file: runs each line of its input, and prints the rows."""

from __future__ import annotations

import json
import sqlite3
import sys

connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=10)
for line in sys.stdin:
    rows = connection.execute(json.loads(line)).fetchall()
    print(json.dumps([[repr(value) for value in row] for row in rows]), flush=True)
