"""`regard.doctor` reports the same about a model in a wrapper as about the model itself."""

from __future__ import annotations

import sys
from functools import cache

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from regard import doctor  # noqa: E402
from tests.helpers.nightly import keep_in_ci  # noqa: E402
from tests.helpers.port_bugs import PORT_BUGS  # noqa: E402
from tests.helpers.ported_decoder import PortedDecoder  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402


class Passthrough(torch.nn.Module):
    """A wrapper whose signature says nothing about its arguments."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.fixture
def one_rank():
    """A gloo group of this process alone."""
    if not torch.distributed.is_available() or sys.platform == "win32":
        pytest.skip("torch.distributed with gloo is not available")
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def add_adapter(model, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
    return peft.get_peft_model(model, config).eval()


def shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS = {
    "*args": Passthrough,
    "*args twice": lambda model: Passthrough(Passthrough(model)),
    "peft": add_adapter,
    "peft with a task": lambda model: add_adapter(model, task_type="CAUSAL_LM"),
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "DDP of peft": lambda model: torch.nn.parallel.DistributedDataParallel(add_adapter(model)),
    "FSDP2": shard,
}
MODELS = {
    "Llama": (TINY["Llama"].build, lambda: TINY["Llama"].inputs("right")),
    "Llama on ids": (TINY["Llama"].build, lambda: TINY["Llama"].inputs("none")["input_ids"]),
    "BERT": (TINY["BERT"].build, lambda: TINY["BERT"].inputs("right")),
    "port": (lambda: PortedDecoder().eval(), PORT_BUGS["QK norm forgotten"].inputs),
    **{
        name: (PORT_BUGS[name].build, PORT_BUGS[name].inputs)
        for name in ("padding masked in the prefill only", "causal mask dropped in padded batches")
    },
}
# LoRA for BERT needs the names of its linear layers; peft's task needs a configuration of transformers.
LACKING = {("peft", "BERT"), ("DDP of peft", "BERT")}


def list_pairs():
    pairs = [(wrapper, model) for wrapper in WRAPPERS for model in MODELS if (wrapper, model) not in LACKING]
    return [pair for pair in pairs if pair[0] != "peft with a task" or pair[1].startswith("Llama")]


def describe(findings):
    """Return everything that doctor reports, without the names of modules, which a wrapper prefixes."""
    found = [
        (finding.kind, finding.severity, finding.layer, finding.heads, finding.rows) for finding in findings
    ]
    return found, [str(check) for check in findings.checks], findings.scope


@cache
def examine_bare(name):
    build, inputs = MODELS[name]
    return describe(doctor(build(), inputs()))


PAIRS = list_pairs()
EACH_ONCE = [
    pair for pair in PAIRS if pair[0] == "*args" or pair[1] == "Llama"
]  # each wrapper and each model


@pytest.mark.parametrize(("wrapper", "name"), keep_in_ci(PAIRS, *EACH_ONCE))
def test_a_wrapped_model_has_the_findings_checks_and_passes_of_the_model(one_rank, wrapper, name):
    build, inputs = MODELS[name]
    model = WRAPPERS[wrapper](build())
    assert describe(doctor(model, inputs())) == examine_bare(name)
