"""Policies from configurations and the environment, and reports as numbers for loggers."""

import pytest
from torch import optim

from fsdp_offload import OffloadPolicy
from fsdp_offload.integrations.plain_values import metrics_of, policy_from
from tests.parity import Net, attach, take_step


def test_nothing_is_the_default() -> None:
    assert policy_from() == policy_from({}) == OffloadPolicy()


def test_a_policy_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_BUCKET_BYTES", "1024")
    policy = OffloadPolicy(overlap="forward")
    assert policy_from(policy) is policy


def test_values_as_yaml_and_command_lines_give_them() -> None:
    values = {"bucket_bytes": "1048576", "overlap": "forward", "host_fraction": "0.25", "pin_memory": "none"}
    expected = OffloadPolicy(bucket_bytes=1 << 20, overlap="forward", host_fraction=0.25, pin_memory=None)
    assert policy_from(values) == expected
    assert policy_from({**values, "bucket_bytes": 1 << 20, "parameters": "false"}) == expected
    text = {"overlap": "iteration", "device_bytes": "auto", "parameters": "False", "serial": 0}
    assert policy_from(text) == OffloadPolicy(overlap="iteration")


def test_the_environment_gives_what_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_BUCKET_BYTES", "2048")
    monkeypatch.setenv("FSDP_OFFLOAD_DEVICE_BYTES", "8192")
    assert policy_from({"bucket_bytes": 4096}) == OffloadPolicy(bucket_bytes=4096, device_bytes=8192)


def test_what_no_policy_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no bucket_size\. Did you mean bucket_bytes\? It has parameters, overlap"):
        policy_from({"bucket_size": 1})
    monkeypatch.setenv("FSDP_OFFLOAD_OVERLAP", "sometimes")
    with pytest.raises(
        ValueError, match=r"overlap must be one of .*, got 'sometimes' \(from the environment: FSDP_OFFLOAD_OVERLAP\)"
    ):
        policy_from()


def test_other_ways_to_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy_from({"bucket_bytes": 2048.0, "parameters": 0}) == OffloadPolicy(bucket_bytes=2048)
    assert policy_from({"device_bytes": "1e9", "overlap": "Iteration"}) == OffloadPolicy(
        device_bytes=10**9, overlap="iteration"
    )
    monkeypatch.setenv("FSDP_OFFLOAD_OVERLAP", "forward")
    monkeypatch.setenv("FSDP_OFFLOAD_BUCKET_BYTES", "")
    monkeypatch.setenv("FSDP_OFFLOAD_TEST_DEVICE", "cpu")
    assert policy_from() == OffloadPolicy(overlap="forward")


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_BUCKET_BYTES", "64 megabytes")
    with pytest.raises(TypeError, match=r"got '64 megabytes' \(from the environment: FSDP_OFFLOAD_BUCKET_BYTES\)"):
        policy_from({"overlap": "forward"})
    monkeypatch.delenv("FSDP_OFFLOAD_BUCKET_BYTES")
    monkeypatch.setenv("FSDP_OFFLOAD_BUCKET_BYTE", "4096")
    with pytest.raises(
        ValueError, match=r"no bucket_byte\. Did you mean bucket_bytes\?.*environment: FSDP_OFFLOAD_BUCKET_BYTE\)"
    ):
        policy_from({"bucket_bytes": 4096})


def test_metrics_are_the_reports_numbers() -> None:
    plain = optim.AdamW(Net().parameters())
    assert metrics_of(plain) == {}
    optimizer = attach(plain)
    take_step(optimizer, 3)
    report, metrics = optimizer.offload_report(), metrics_of(optimizer)
    assert metrics == {f"offload/{name}": value for name, value in report.metrics().items()}
    assert metrics["offload/memory/host_bytes"] == report.memory.host_bytes > 0
    assert set(metrics_of(optimizer, "o.")) == {"o." + name.removeprefix("offload/") for name in metrics}
