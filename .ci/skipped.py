"""Fails when a test was skipped for a reason that is not allowed: ``skipped.py REPORT < REASONS``.

REPORT is pytest's JUnit file; REASONS has the beginning of an allowed reason a line.
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree


def main() -> int:
    allowed = tuple(line.strip() for line in sys.stdin if line.strip())
    cases = list(ElementTree.parse(sys.argv[1]).iter("testcase"))
    skipped = [
        (f"{case.get('classname')}::{case.get('name')}", found.get("message", ""))
        for case in cases
        for found in case.iter("skipped")
        if found.get("type") != "pytest.xfail"
    ]
    wrong = [(test, reason) for test, reason in skipped if not reason.startswith(allowed)]
    for test, reason in wrong:
        print(f"{test} was skipped, though this machine could run it: {reason}")
    if not wrong:
        why = f"{len(skipped)} skipped, which this machine could not help" if skipped else "none skipped"
        print(f"{len(cases)} tests, {why}")
    return 1 if wrong or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
