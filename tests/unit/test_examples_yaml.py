"""The deployment examples: their structure, their shell, and that exit 10 passes where they say so and 20 never does."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml

from ray_nccl_guard.cli import VERBS
from ray_nccl_guard.compat.record import ENVIRONMENT

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOCKERFILE = EXAMPLES / "image_gate" / "Dockerfile"
YAMLS = sorted([*EXAMPLES.glob("kuberay/*.yaml"), *EXAMPLES.glob("pods/*.yaml")])
SHELL_DEADLINE_S = 30


def documents(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined, comments dropped."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [tuple(line.split(None, 1)) for line in lines]


def worker_groups() -> list[tuple[str, dict]]:
    found = []
    for path in EXAMPLES.glob("kuberay/*.yaml"):
        for document in documents(path):
            spec = document["spec"].get("rayClusterSpec", document["spec"])
            found += [(path.name, group["template"]["spec"]) for group in spec["workerGroupSpecs"]]
    return found


def shell_of_containers() -> list[str]:
    """Every `sh -c` text in the examples."""
    return [c["args"][0] for _, pod in worker_groups() for c in pod["initContainers"]]


def shell_of_image() -> str:
    (gate,) = [text for name, text in instructions() if name == "RUN" and "compat" in text]
    return gate


def guard_commands() -> list[list[str]]:
    texts = [*shell_of_containers(), shell_of_image().replace('"$@"', "--target sm_90")]
    for path in YAMLS:
        for document in documents(path):
            if "entrypoint" in document["spec"]:
                texts.append(document["spec"]["entrypoint"])
            if document["kind"] == "Job":
                texts += [shlex.join(c["command"]) for c in document["spec"]["template"]["spec"]["containers"]]
    found = [match[0] for text in texts for match in re.finditer(r"ray-nccl-guard [^|;&]*", text)]
    return [shlex.split(text)[1:] for text in found]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_every_manifest_is_yaml_with_kind_name_and_version(path):
    for document in documents(path):
        assert document["apiVersion"] and document["kind"] and document["metadata"]["name"]


def test_the_ray_manifests_have_the_fields_kuberay_requires():
    kinds = {}
    for path in EXAMPLES.glob("kuberay/*.yaml"):
        for document in documents(path):
            assert document["apiVersion"] == "ray.io/v1"
            kinds[document["kind"]] = document
            spec = document["spec"].get("rayClusterSpec", document["spec"])
            assert spec["headGroupSpec"]["template"]["spec"]["containers"]
            assert all(isinstance(value, str) for value in spec["headGroupSpec"]["rayStartParams"].values())
            for group in spec["workerGroupSpecs"]:
                assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
                assert {"groupName", "rayStartParams", "template"} <= group.keys()
    assert set(kinds) == {"RayJob", "RayCluster"}
    assert kinds["RayJob"]["spec"]["entrypoint"].startswith("ray-nccl-guard run ")


def test_init_containers_have_the_image_the_gpus_and_the_mounts_of_the_worker():
    for name, pod in worker_groups():
        (worker,) = pod["containers"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"]
        for container in pod["initContainers"]:
            for field in ("image", "resources", "volumeMounts"):
                assert container[field] == worker[field], (name, container["name"], field)
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in worker["volumeMounts"]} <= volumes


def test_the_worker_reads_the_record_that_its_init_container_writes():
    for _, pod in worker_groups():
        env = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert f"--record {env[ENVIRONMENT]} " in pod["initContainers"][0]["args"][0]


def test_the_two_pods_find_each_other_by_name():
    service, job = documents(EXAMPLES / "pods" / "two_pods.yaml")
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert env["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert env["WORLD_SIZE"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert service["spec"]["selector"] == {"job-name": name}
    assert {"RANK", "LOCAL_RANK"} <= env.keys()
    assert container["command"][1:3] == ["probe", "--from-env"]


def test_the_dockerfile_has_known_instructions_and_a_last_stage_that_needs_the_gate():
    names = [name for name, _ in instructions()]
    assert set(names) <= {"ARG", "FROM", "RUN", "COPY"}
    assert names[:2] == ["ARG", "FROM"]
    last_from = max(i for i, name in enumerate(names) if name == "FROM")
    after = [text for name, text in instructions()[last_from:] if name == "COPY"]
    assert any("--from=gate" in text for text in after), "a stage that nothing needs is not built"


@pytest.mark.parametrize("text", [*shell_of_containers(), shell_of_image()])
@pytest.mark.parametrize(("status", "passes"), [(0, True), (10, True), (20, False), (2, False)])
def test_exit_10_passes_and_20_does_not(tmp_path, text, status, passes):
    stub = tmp_path / "ray-nccl-guard"
    stub.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nexit {status}\n')
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TARGETS": "sm_90 sm_120", "DRIVER_CUDA": "12.8"}
    done = subprocess.run(["/bin/sh", "-c", text], env=env, timeout=SHELL_DEADLINE_S, check=False)
    assert (done.returncode == 0) is passes
    if text == shell_of_image():
        said = (tmp_path / "said").read_text()
        assert said == "compat --target sm_90 --target sm_120 --driver-cuda 12.8 --record /tmp/nccl_compat.json\n"


@pytest.mark.parametrize("words", guard_commands(), ids=" ".join)
def test_every_command_in_the_examples_is_one_the_command_line_takes(words):
    verb, *rest = words
    if verb not in VERBS:
        pytest.skip(f"the verb {verb} is not part of this version yet")
    module = importlib.import_module(f"ray_nccl_guard.cli.{verb}")
    parser = ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(rest)
