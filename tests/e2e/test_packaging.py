"""What surrounds the program: the set-up as an ordinary user, the systemd unit, what the image is made from."""

import configparser
import fnmatch
import os
import re
import shutil
import subprocess

import pytest
from conftest import BIN, ROOT

# What every Debian has.
ESSENTIAL = {"libc6", "libgcc-s1", "libstdc++6", "libbz2-1.0"}


def packages_of(group):
    lines = [
        line.split() for line in (ROOT / "packages/debian.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    return {name for name, *groups in lines if group in groups}


class Machine:
    """A tree with scripts/install-packages.sh, on a machine whose apt and sudo write down how they are called."""

    def __init__(self, folder, installed):
        self.folder, self.bin, self.log = folder, folder / "bin", folder / "log"
        for name in ("scripts", "packages"):
            shutil.copytree(ROOT / name, folder / name)
        self.bin.mkdir()
        for name in ("bash", "dirname", "env", "id", "grep", "true"):
            (self.bin / name).symlink_to(shutil.which(name))
        (folder / "installed").write_text("\n".join(sorted(installed)) + "\n")
        self.program("id", "echo 1000")
        self.program("apt-cache", "echo known")
        self.program(
            "dpkg-query",
            f'if grep -qxF -- "${{@: -1}}" {folder}/installed; then echo -n installed; else exit 1; fi',
        )
        self.program("apt-get", f'echo "root=${{AS_ROOT:-0}} $*" >>{self.log}')

    def program(self, name, body):
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
        (self.bin / name).chmod(0o755)

    def install(self, *groups):
        return subprocess.run(
            [self.folder / "scripts/install-packages.sh", *groups],
            capture_output=True,
            text=True,
            env={"PATH": str(self.bin)},
        )

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


def test_an_ordinary_user_with_sudo_installs_only_what_is_missing_and_as_root(tmp_path):
    machine = Machine(tmp_path, packages_of("build") - {"ccache", "ninja-build"})
    machine.program("sudo", 'AS_ROOT=1 exec "$@"')
    done = machine.install("build")
    assert done.returncode == 0, done.stderr
    assert machine.calls() == ["root=1 -y --no-install-recommends install ccache ninja-build"]


def test_an_ordinary_user_without_sudo_is_told_what_root_has_to_run(tmp_path):
    machine = Machine(tmp_path, packages_of("build") - {"ccache"})
    done = machine.install("build")
    assert done.returncode == 1
    assert "apt-get install ccache\n" in done.stderr and "sudo" in done.stderr
    assert machine.calls() == []


def test_a_user_whom_sudo_refuses_is_told_what_root_has_to_run(tmp_path):
    machine = Machine(tmp_path, packages_of("build") - {"ccache"})
    machine.program("sudo", "echo 'user is not in the sudoers file' >&2; exit 1")
    done = machine.install("build")
    assert done.returncode == 1
    assert "apt-get install ccache\n" in done.stderr
    assert machine.calls() == []


def test_where_nothing_is_missing_neither_sudo_nor_apt_is_asked(tmp_path):
    machine = Machine(tmp_path, packages_of("build") | packages_of("test"))
    assert machine.install("build", "test").returncode == 0
    assert machine.calls() == []


def test_a_package_of_two_groups_is_installed_for_either(tmp_path):
    assert "ca-certificates" in packages_of("build") & packages_of("run")
    for group in ("build", "run"):
        machine = Machine(tmp_path / group, packages_of(group) - {"ca-certificates"})
        machine.program("sudo", 'AS_ROOT=1 exec "$@"')
        assert machine.install(group).returncode == 0
        assert machine.calls() == ["root=1 -y --no-install-recommends install ca-certificates"]


def test_the_image_has_the_packages_of_every_library_that_the_program_loads(phsa):
    if not shutil.which("dpkg-query"):
        pytest.skip("this is no Debian")
    loaded = re.findall(r"=> (/\S+)", subprocess.run(["ldd", BIN / "phsa"], capture_output=True, text=True).stdout)
    assert loaded
    # dpkg knows a file by the path in its package: from before /lib was a link to /usr/lib, perhaps.
    names = {
        name: path for path in loaded for name in (os.path.realpath(path), os.path.realpath(path).removeprefix("/usr"))
    }
    owners = subprocess.run(["dpkg-query", "-S", *names], capture_output=True, text=True).stdout.splitlines()
    packages = {names[line.split(": ")[1]]: line.split(":")[0] for line in owners}
    assert packages.keys() == set(loaded)
    needed = set(packages.values())
    assert needed - ESSENTIAL <= packages_of("run")


def unit():
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(ROOT / "packaging/phsa.service")
    return parser["Service"]


def test_the_unit_lets_the_server_open_a_gpu_and_no_other_device():
    service = unit()
    assert service.get("PrivateDevices", "no") == "no"  # it hides /dev/nvidia*
    assert service["DevicePolicy"] == "closed"
    pattern, access = service["DeviceAllow"].split()
    assert access == "rw"
    # As /proc/devices names them where NVIDIA's driver is loaded.
    for group in ("nvidia", "nvidiactl", "nvidia-frontend", "nvidia-uvm", "nvidia-caps"):
        assert fnmatch.fnmatchcase("char-" + group, pattern), group
    for group in ("mem", "fb", "drm", "vfio", "input", "snd"):
        assert not fnmatch.fnmatchcase("char-" + group, pattern), group


def test_systemd_finds_the_unit_without_fault_and_well_locked(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze here")
    # The program is not installed where the unit expects it.
    text = (ROOT / "packaging/phsa.service").read_text()
    (tmp_path / "phsa.service").write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    verified = subprocess.run(["systemd-analyze", "verify", tmp_path / "phsa.service"], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", tmp_path / "phsa.service"]
    checked = subprocess.run(security, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout.splitlines()[-1]
