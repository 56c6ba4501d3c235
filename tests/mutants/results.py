"""What came of each fault. It is written after each one, so that a stopped run goes on where it was."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable
from typing import Protocol

COLUMNS = ("file", "planted", "killed", "survived", "equivalent", "seconds")


class Fault(Protocol):
    @property
    def path(self) -> str: ...  # of its file

    @property
    def change(self) -> str: ...  # what it is, without the file

    @property
    def reason(self) -> str: ...  # why it is none, or nothing


@dataclasses.dataclass
class Result:
    path: str
    fault: str
    digest: str  # of its file
    killer: str  # the test, or nothing
    seconds: float
    note: str = ""


class Results:
    def __init__(self, root: pathlib.Path, log: pathlib.Path) -> None:
        self.root, self.log = root, log
        self._digests: dict[str, str] = {}
        self.of: dict[tuple[str, str], Result] = {}
        self.read()

    def read(self) -> None:
        if self.log.exists():
            with self.log.open(newline="") as file:
                for row in csv.DictReader(file):  # the last of a fault stands
                    self.of[row["path"], row["fault"]] = Result(**(row | {"seconds": float(row["seconds"])}))  # type: ignore[arg-type]

    def digest(self, path: str) -> str:
        if path not in self._digests:
            self._digests[path] = hashlib.sha256((self.root / path).read_bytes()).hexdigest()[:12]
        return self._digests[path]

    def known(self, fault: Fault) -> Result | None:
        """If its file is still the same."""
        result = self.of.get((fault.path, str(fault)))
        return result if result and result.digest == self.digest(fault.path) else None

    def killer(self, fault: Fault) -> str:
        """The test that noticed it some time: the likeliest to do so again."""
        result = self.of.get((fault.path, str(fault)))
        return result.killer if result else ""

    def add(self, fault: Fault, killer: str, seconds: float, note: str = "") -> None:
        result = Result(fault.path, str(fault), self.digest(fault.path), killer, round(seconds, 1), note)
        self.of[fault.path, str(fault)] = result
        new = not self.log.exists()
        with self.log.open("a", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Result)], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(dataclasses.asdict(result))
        outcome = (
            f"killed   {seconds:6.1f} s  {fault}  by {killer}" if killer else f"SURVIVED {seconds:6.1f} s  {fault}  {note}"
        )
        print(outcome, flush=True)

    def write_table(self, table: pathlib.Path, planned: Iterable[Fault]) -> None:
        """Files of which every fault was tried. Others keep the row of an earlier run."""
        rows: dict[str, list[object]] = {}
        if table.exists():
            with table.open(newline="") as file:
                rows = {row[0]: list(row[1:]) for row in list(csv.reader(file))[1:]}
        of_file: dict[str, list[Fault]] = {}
        for fault in planned:
            of_file.setdefault(fault.path, []).append(fault)
        for path, faults in of_file.items():
            results = [self.known(fault) for fault in faults if not fault.reason]
            if all(results):
                killed = sum(bool(result.killer) for result in results if result)
                seconds = round(sum(result.seconds for result in results if result))
                rows[path] = [len(faults), killed, len(results) - killed, len(faults) - len(results), seconds]
        _write(table, COLUMNS, ([name, *rows[name]] for name in sorted(rows)))


def write_reasons(table: pathlib.Path, planned: Iterable[Fault]) -> None:
    """Of the faults that are none."""
    given = [f for f in planned if f.reason]
    _write(table, ("file", "fault", "reason"), ([f.path, f.change, f.reason] for f in sorted(given, key=lambda f: f.path)))


def _write(table: pathlib.Path, header: Iterable[str], rows: Iterable[list[object]]) -> None:
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
