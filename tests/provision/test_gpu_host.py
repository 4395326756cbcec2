"""What a profile asks of a GPU host, and how a host's packages are held against it."""

import importlib.util

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.loading import load_profile
from toolkit.provision.gpu_host import gpu_host_settings, require_gpu_host
from toolkit.resources import bundled

PCIE, B300, H200 = "rtx-pro-6000-pcie-8x", "b300-nvlink-8x", "h200-nvlink"
UBUNTU, NVIDIA = "nvidia-driver-580-server-open", "nvidia-open-580"
FABRIC = "nvidia-fabricmanager-580"
LOADED = "580.95.05"


def asked(name, *sets):
    return gpu_host_settings(load_profile(name, sets=sets).profile)


def test_only_nvlink_has_a_fabric_manager_and_only_its_fifth_generation_nvlsm():
    assert asked(PCIE)["fabric_packages"] == []
    assert asked(H200)["fabric_packages"] == [FABRIC, "nvidia-fabricmanager"]
    assert ("nvlsm" in asked(H200)["packages"], asked(H200)["boot_modules"]) == (False, [])
    assert ("nvlsm" in asked(B300)["packages"], asked(B300)["boot_modules"]) == (True, ["ib_umad", "mlx5_ib"])


def test_the_toolkit_is_that_of_the_engine_or_none():
    assert "cuda-toolkit-13-0" in asked(PCIE)["packages"]
    assert asked(PCIE, "hardware.driver.cuda_toolkit=false")["packages"] == ["pciutils"]


def test_names_of_the_profile_come_before_those_of_the_branch():
    assert asked(PCIE)["driver_packages"] == [UBUNTU, NVIDIA, "nvidia-open"]
    assert asked(PCIE, "hardware.driver.package=my-driver")["driver_packages"] == ["my-driver"]
    assert asked(H200, "hardware.driver.fabric_manager=fm")["fabric_packages"] == ["fm"]


def test_without_a_driver_there_is_nothing_to_prepare():
    assert asked("local-cpu") is None
    with pytest.raises(ConfigError, match=r"'local-cpu' has no hardware\.driver"):
        require_gpu_host(load_profile("local-cpu").profile)


def loaded(name):
    path = bundled("playbooks") / "roles" / "gpu_host" / "library" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_module", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def module(monkeypatch, tmp_path):
    found = loaded("gpu_host")
    monkeypatch.setattr(found, "MODULES", tmp_path / "module")
    monkeypatch.setattr(found, "COMMAND_LINE", tmp_path / "cmdline")
    (tmp_path / "cmdline").write_text("quiet iommu=pt\n")
    return found


@pytest.fixture
def host(module, monkeypatch, tmp_path):
    """The module's view of a host: installed packages, what apt has, the loaded driver."""

    def make(name, installed=(), offered=(), loaded=LOADED):
        packages = {item.split("=")[0]: (item.split("=")[1], False) for item in installed}
        monkeypatch.setattr(module, "installed_packages", lambda: packages)
        known = {}
        for item in offered:
            known.setdefault(item.split("=")[0], []).append(item.split("=")[1])
        monkeypatch.setattr(module, "offered", lambda package: known.get(package, []))
        if loaded:
            (tmp_path / "module" / "nvidia").mkdir(parents=True, exist_ok=True)
            (tmp_path / "module" / "nvidia" / "version").write_text(loaded)
        return module.Host(asked(name))

    return make


def test_a_driver_of_the_branch_stays_though_apt_has_a_newer_one(host):
    there = host(PCIE, [f"{UBUNTU}=580.95.05-0ubuntu1"], [f"{UBUNTU}=580.159.03-0ubuntu1"])
    assert there.driver() == "580.95.05"
    assert there.install == []


@pytest.mark.parametrize("old", ["580.65.05-0ubuntu1", "1:580.42-1"])
def test_one_below_the_floor_is_replaced_by_the_newest(host, old):
    offered = [f"{UBUNTU}=580.159.03-0ubuntu1", f"{UBUNTU}=580.95.05-0ubuntu1"]
    there = host(PCIE, [f"{UBUNTU}={old}"], offered, loaded="580.42")
    assert there.driver() == "580.159.03"
    assert there.install == [f"{UBUNTU}=580.159.03-0ubuntu1"]
    assert there.replaces.startswith("driver 580.159.03 replaces 580.42, which is loaded")


def test_a_name_without_a_branch_is_taken_in_a_version_of_the_branch_only(host):
    offered = ["nvidia-open=590.44.01-1", "nvidia-open=580.105.08-1"]
    there = host(PCIE, [], offered, loaded="")
    assert there.driver() == "580.105.08"
    assert there.install == ["nvidia-open=580.105.08-1"]
    assert there.replaces == ""


def test_a_fabric_manager_that_no_source_has_in_the_drivers_version_is_told(host):
    there = host(H200, [f"{UBUNTU}=580.95.05-0ubuntu1"], [f"{FABRIC}=580.159.03-0ubuntu1"])
    there.fabric_manager(there.driver())
    said = f"no configured apt source has {FABRIC} or nvidia-fabricmanager 580.95.05, the driver's version"
    assert there.unknown == [said]
    assert there.install == []


def test_other_fabric_managers_go_and_developers_files_stay(host):
    installed = [
        f"{UBUNTU}=580.95.05-1",
        "nvidia-fabricmanager-570=570.1-1",
        "nvidia-fabricmanager-dev-570=570.1-1",
    ]
    there = host(H200, installed, [f"{FABRIC}=580.95.05-1"])
    there.fabric_manager(there.driver())
    assert there.install == [f"{FABRIC}=580.95.05-1"]
    assert there.remove == ["nvidia-fabricmanager-570"]


def test_modules_that_come_ready_built_hold_the_kernel_and_containers_are_not_concerned(host):
    installed = ["linux-modules-nvidia-580-server-open-generic=6.8.0-50", "linux-generic=6.8.0.50"]
    installed += ["linux-image-generic=6.8.0.50", "nvidia-container-toolkit=1.17.4-1", "curl=8.5-2"]
    assert host(PCIE, installed).hold() == [
        "linux-generic",
        "linux-image-generic",
        "linux-modules-nvidia-580-server-open-generic",
    ]


def test_reasons_for_a_reboot(host, tmp_path):
    there = host(PCIE, [f"{UBUNTU}=580.95.05-1"], loaded="580.65.06")
    parameters = tmp_path / "module" / "nvidia_uvm" / "parameters"
    parameters.mkdir(parents=True)
    (parameters / "uvm_disable_hmm").write_text("N\n")
    assert list(there.reboot()) == [
        "the module of driver 580.65.06 is loaded, installed is 580.95.05",
        "iommu=off is not on the kernel's command line",
        "module nvidia_uvm was loaded with uvm_disable_hmm=0, not 1",
    ]
    (parameters / "uvm_disable_hmm").write_text("Y\n")
    (tmp_path / "cmdline").write_text("quiet iommu=off\n")
    assert list(host(PCIE, [f"{UBUNTU}=580.95.05-1"], loaded=LOADED).reboot()) == []


def test_holds_are_taken_off_for_the_simulation_and_of_the_named_packages_alone():
    stanzas = [
        f"Package: {name}\nStatus: hold ok installed\nVersion: 1" for name in ("one", "one-two", "two")
    ]
    found = loaded("apt_ahead").released("\n\n".join(stanzas) + "\n\n", ["one", "two"]).split("\n\n")
    assert [" hold " in stanza for stanza in found] == [False, True, False, False]
    assert found[0] == stanzas[0].replace("hold", "install")


def test_apts_reasons_are_told_with_their_packages():
    output = (
        "The following packages have unmet dependencies:\n one : Depends: two but it is  not installable\n"
    )
    errors = "W: a warning\nE: Unable to correct problems, you have held broken packages.\n"
    said = "one : Depends: two but it is not installable; "
    said += "Unable to correct problems, you have held broken packages."
    assert loaded("apt_ahead").complaint(output, errors) == said
    assert loaded("apt_ahead").complaint("", "killed\n") == "killed"


def test_what_apt_removes_besides_is_told():
    simulated = "Remv nvidia-fabricmanager-570 [570.1-1]\nRemv site-tool:amd64 [1.0]\nInst two (1.0 apt)\n"
    assert loaded("apt_ahead").removed(simulated, ["nvidia-fabricmanager-570"]) == ["site-tool"]


def test_packages_that_a_cut_off_dpkg_left_are_found(module, monkeypatch, tmp_path, host):
    shown = "installed ok curl\nunpacked ok nvidia-dkms-580\nconfig-files ok gone\ninstalled reinstreq vim\n"
    monkeypatch.setattr(module, "output", lambda *command: shown)
    monkeypatch.setattr(module, "DPKG_UPDATES", tmp_path)
    there = host(PCIE)
    assert there.unfinished() == ["nvidia-dkms-580", "vim"]
    assert list(map(module.of_driver, there.unfinished())) == [True, False]
    shown = "installed ok curl\n"
    assert there.unfinished() == []
    (tmp_path / "0001").touch()
    assert there.unfinished() == ["dpkg was interrupted"]
