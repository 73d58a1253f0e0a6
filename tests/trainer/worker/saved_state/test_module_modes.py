"""Train mode and `requires_grad` of modules are saved as differences and restored."""

import json

from torch import nn

from trainer.worker.saved_state.model_state import ModuleModes


def built() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2))


def modes(model: nn.Module) -> list[bool]:
    trains = [parameter.requires_grad for parameter in model.parameters()]
    return trains + [module.training for module in model.modules()]


def test_a_model_that_training_has_not_changed_has_no_facts() -> None:
    model = built().eval()
    assert ModuleModes(model).facts() == {}


def test_a_module_of_which_all_changed_is_one_entry() -> None:
    model = built()
    noted = ModuleModes(model)
    model[0].eval()
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    facts = json.loads(json.dumps(noted.facts()))
    assert facts == {
        "requires_grad": {"model.0.": False, "model.1.bias": False},
        "training": {"model.0.": False},
    }
    again = built()
    renewed = ModuleModes(again)
    assert renewed.restore(facts) == []
    assert modes(again) == modes(model)
    assert renewed.facts() == facts, "the next save of the restarted run has them too"


def test_a_module_without_the_modules_inside_it_is_named_by_itself() -> None:
    model = built()
    noted = ModuleModes(model)
    model.training = model[0].training = False
    assert noted.facts() == {"training": {"model": False, "model.0": False}}
    again = built()
    assert ModuleModes(again).restore(noted.facts()) == []
    assert modes(again) == modes(model)


def test_a_part_that_is_gone_is_reported_by_name() -> None:
    model = built()
    noted = ModuleModes(model)
    assert noted.restore({}) == []
    words = noted.restore({"requires_grad": {"model.2.weight": True}, "training": {"model.5.": False}})
    assert words == [
        "the model has no model.2.weight, whose requires_grad had changed",
        "the model has no model.5., whose training had changed",
    ]
    assert modes(model) == modes(built())


def test_a_module_that_is_made_later_is_not_part_of_it() -> None:
    model = built()
    noted = ModuleModes(model)
    model.append(nn.ReLU().eval())
    assert noted.facts() == {}
