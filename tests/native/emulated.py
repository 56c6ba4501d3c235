"""Runs programs on AVX-512 where the processor has none: `make test-avx512`.

    python tests/native/emulated.py BUILD WORK COMMAND [COMMAND ...]

Bochs emulates a Skylake-X. It boots Debian's or Ubuntu's Linux from a CD, whose first file system holds the library and the
programs of BUILD. Each COMMAND is a line of the shell there; the machine's serial line is the output. WORK keeps the kernel and
the CD. Linux on x86-64 alone; the packages of PACKAGES must be installed.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import time

PACKAGES = ["bochs", "bochsbios", "busybox-static", "cpio", "isolinux", "syslinux-common", "vgabios", "xorriso"]
KERNELS = ("linux-image-cloud-amd64", "linux-image-virtual")  # Debian's and Ubuntu's packages that name the newest
PROGRAMS = ("libmx_driving.so", "tests/native/native_tests", "tests/native/compare")
LOADER = ("/usr/lib/ISOLINUX/isolinux.bin", "/usr/lib/syslinux/modules/bios/ldlinux.c32")
MOST_SECONDS = 7200

INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
export LD_LIBRARY_PATH=/programs
cd /programs
for number in $(seq {count}); do
    sh /commands/$number && continue
    echo "a command failed"
    sleep 2
    poweroff -f
done
echo "all commands passed"
sleep 2
poweroff -f
"""

# noxsaves, clearcpuid: Bochs says another length of the compact form of saved registers than Linux expects, which then has no
# AVX at all.
LINUX = """serial 0 115200
default programs
label programs
  kernel vmlinuz
  append initrd=initrd console=ttyS0 mitigations=off noxsaves clearcpuid=xsavec nokaslr panic=-1 loglevel=3
"""

# sync=none: the emulated clock follows the emulated instructions, so that a slow host is no slow machine.
BOCHS = """config_interface: textconfig
sound: driver=dummy
display_library: rfb, options="timeout=0"
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=0
megs: 768
clock: sync=none
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=programs.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
log: bochs.log
panic: action=fatal
error: action=report
info: action=report
debug: action=ignore
"""


def output_of(*command: object, **options: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)  # pyright: ignore
    if done.returncode:
        raise SystemExit(f"emulated.py: {' '.join(words)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_packages() -> None:
    state = subprocess.run(
        ["dpkg-query", "-W", "-f=${Package} ${Status}\n", *PACKAGES], capture_output=True, text=True, check=False
    )
    if missing := [name for name in PACKAGES if f"{name} install ok installed" not in state.stdout]:
        raise SystemExit(f"emulated.py: packages are missing: apt-get install --no-install-recommends {' '.join(missing)}")


def fetch_kernel(work: pathlib.Path) -> None:
    """Out of its package, which is not installed."""
    if (work / "vmlinuz").exists():
        return
    found = (re.search(r"Depends: (linux-image-\d\S*)", output_of("apt-cache", "depends", name)) for name in KERNELS)
    name = next((match[1] for match in found if match), None)
    if name is None:
        raise SystemExit(f"emulated.py: apt-cache must know one of {', '.join(KERNELS)}")
    output_of("apt-get", "download", "-qq", name, cwd=work)
    (package,) = work.glob(f"{name}_*.deb")
    output_of("dpkg-deb", "--extract", package, work / "kernel")
    (image,) = (work / "kernel" / "boot").glob("vmlinuz-*")
    shutil.copy(image, work / "vmlinuz")
    shutil.rmtree(work / "kernel")
    package.unlink()


def libraries_of(programs: list[pathlib.Path]) -> set[str]:
    """What the loader takes from the system."""
    lines = "".join(output_of("ldd", program) for program in programs)
    return {path for path in re.findall(r"(/\S+) \(0x", lines) if pathlib.Path(path).name != PROGRAMS[0]}


def make_root(root: pathlib.Path, build: pathlib.Path, commands: list[str]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "commands", "dev", "proc", "programs", "sys", "tmp"):
        (root / folder).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin")
    for name in ("mount", "poweroff", "seq", "sh", "sleep", "tail"):
        (root / "bin" / name).symlink_to("busybox")
    programs = [build / name for name in PROGRAMS]
    for program in programs:
        shutil.copy(program, root / "programs")
    for library in libraries_of(programs):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    for number, command in enumerate(commands, 1):
        (root / "commands" / str(number)).write_text(command + "\n")
    (root / "init").write_text(INIT.format(count=len(commands)))
    (root / "init").chmod(0o755)


def make_cd(work: pathlib.Path) -> None:
    cd = work / "cd"
    shutil.rmtree(cd, ignore_errors=True)
    cd.mkdir()
    output_of("sh", "-c", "find . | cpio --create --format=newc --quiet > ../cd/initrd", cwd=work / "root")
    for file in (work / "vmlinuz", *LOADER):
        shutil.copy(file, cd)
    (cd / "isolinux.cfg").write_text(LINUX)
    boot = ["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table"]
    output_of("xorriso", "-as", "mkisofs", "-quiet", "-o", "programs.iso", *boot, "cd", cwd=work)


def run_machine(work: pathlib.Path) -> str:
    """What its serial line said, which is shown as it comes."""
    serial = work / "serial.txt"
    serial.write_text("")
    (work / "bochsrc").write_text(BOCHS)
    (work / "continue").write_text("continue\n")  # what Debian's Bochs, built with its debugger, waits for
    command = ["bochs-bin", "-q", "-f", "bochsrc", "-rc", "continue"]
    with (work / "bochs.out").open("w") as out:
        machine = subprocess.Popen(command, cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    end, shown = time.monotonic() + MOST_SECONDS, 0
    try:
        while True:
            ended = machine.poll() is not None
            text = serial.read_text(errors="replace").replace("\r", "")
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if ended or time.monotonic() > end:
                return text
            time.sleep(0.5)
    finally:
        machine.kill()


def main() -> None:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    build, work, commands = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    work.mkdir(parents=True, exist_ok=True)
    check_packages()
    fetch_kernel(work)
    make_root(work / "root", build, commands)
    make_cd(work)
    start = time.monotonic()
    text = run_machine(work)
    print(f"The emulated machine ran for {time.monotonic() - start:.0f} s")
    if "instruction set: avx512" not in text.splitlines():
        raise SystemExit("emulated.py: a program must say that it runs on avx512; none did")
    if "all commands passed" not in text.splitlines():
        raise SystemExit("emulated.py: a command failed, or did not end")


if __name__ == "__main__":
    main()
