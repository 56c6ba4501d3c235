"""Add a bill of materials to each wheel (PEP 770): the code of others in its library, as CycloneDX.

The same sources and tools give the same bytes: the serial number comes from the wheel's name, the time from the last commit.
"""

from __future__ import annotations

import datetime
import email
import json
import os
import pathlib
import re
import uuid
import zipfile

import ziglang
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from wheel.wheelfile import WheelFile

SCHEMA = SchemaVersion.V1_6
RUNTIME = pathlib.Path(ziglang.__file__).parent / "lib" / "libcxx" / "include" / "__config"
ZIG_VERSION = next(iter(pathlib.Path(ziglang.__file__).parent.parent.glob("ziglang-*.dist-info"))).name[8:-10]


def runtime_version() -> str:
    """Return the version of LLVM's C++ runtime in Zig: 210108 is 21.1.8."""
    number = int(re.search(r"# *define _LIBCPP_VERSION (\d+)", RUNTIME.read_text())[1])  # pyright: ignore
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def runtimes_of(wheel: str) -> list[Component]:
    """Return the components that Zig links into a library. macOS has an unwinder; Windows needs mingw-w64's startup code."""
    llvm, version = "Apache-2.0 WITH LLVM-exception", runtime_version()
    names = ["compiler-rt", "libc++", "libc++abi"] + ([] if "macosx" in wheel else ["libunwind"])
    components = [component(name, version, ComponentType.LIBRARY, llvm, scope=ComponentScope.REQUIRED) for name in names]
    mingw = [component("mingw-w64", None, ComponentType.LIBRARY, "ZPL-2.1", scope=ComponentScope.REQUIRED)]
    return components + (mingw if "win_" in wheel else [])


def component(name: str, version: str | None, kind: ComponentType, license_: str, **more: object) -> Component:
    return Component(name=name, version=version, type=kind, licenses=[LicenseExpression(license_)], bom_ref=name, **more)  # pyright: ignore


def bill_of(wheel: str, name: str, version: str, license_: str, epoch: int) -> str:
    runtimes = runtimes_of(wheel)
    bom = Bom(components=runtimes, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, wheel))
    url = PackageURL("pypi", name=name, version=version)
    bom.metadata.component = component(name, version, ComponentType.LIBRARY, license_, purl=url)
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc)
    zig = PackageURL("pypi", name="ziglang", version=ZIG_VERSION)
    bom.metadata.tools.components.add(component("ziglang", ZIG_VERSION, ComponentType.APPLICATION, "MIT", purl=zig))
    bom.register_dependency(bom.metadata.component, runtimes)
    return make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=1) + "\n"


def place_of(wheel: pathlib.Path) -> tuple[str, str]:
    """Return the path of the bill in the wheel, and the metadata of the distribution."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return metadata.replace("METADATA", "sboms/mx-driving-portable.cdx.json"), archive.read(metadata).decode()


def add_bill(wheel: pathlib.Path, epoch: int) -> None:
    """Rewrite the wheel with its bill and a RECORD that lists the bill. All times in the archive are `epoch`."""
    path, text = place_of(wheel)
    metadata = email.message_from_string(text)
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)  # the time of files that WheelFile writes, such as RECORD
    bill = bill_of(wheel.name, metadata["Name"], metadata["Version"], metadata["License-Expression"], epoch)
    folder = wheel.parent / "with_bill"
    folder.mkdir()
    with zipfile.ZipFile(wheel) as old, WheelFile(str(folder / wheel.name), "w") as new:
        for item in old.infolist():
            if not item.filename.endswith("/RECORD"):
                new.writestr(item, old.read(item))
        bill_item = zipfile.ZipInfo(path, old.infolist()[0].date_time)
        bill_item.external_attr, bill_item.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
        new.writestr(bill_item, bill)
    (folder / wheel.name).replace(wheel)
    folder.rmdir()


def check_bill(wheel: pathlib.Path) -> str:
    """Check the wheel's bill, and return a sentence with its components."""
    path, _ = place_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        if path not in archive.namelist():
            raise SystemExit(f"sbom.py: {wheel.name} must hold {path}; it does not")
        bill = archive.read(path).decode()
        record = archive.read(path.split("/")[0] + "/RECORD").decode()
    if path not in record:
        raise SystemExit(f"sbom.py: RECORD must name {path}")
    if errors := JsonStrictValidator(SCHEMA).validate_str(bill):
        raise SystemExit(f"sbom.py: {path} must be CycloneDX {SCHEMA.to_version()}; {errors}")
    return "SBOM: " + ", ".join(part["name"] for part in json.loads(bill)["components"])
