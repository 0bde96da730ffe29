"""A file of effects is continued for the same question alone, and whatever changed is measured."""

import functools
import importlib
import json
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.demo.model import Config, Decoder
from clearhead.models.effects.digest import Digests, Undigested


def sections(text):
    """Code by its title."""
    parts = (part.partition("\n") for part in text.split("## ")[1:])
    return {title: code.rstrip() for title, _, code in parts}


# Pieces of a metric: code of a module, in which part(x) is a number that depends on N. Lines that
# begin with # are the code of another module.
PIECES = sections("""
## a constant
def part(x): return x * N

## a constant in a nested function
def part(x): return (lambda y: y * N)(x)

## a default
def part(x, factor=N): return x * factor

## a default by name
def part(x, *, factor=N): return x * factor

## a global number
factor = N
def part(x): return x * factor

## a global list
factors = [[1, {'a': N}]]
def part(x): return x * factors[0][1]['a']

## a set
def part(x): return x * (2 if N in {1, 5, 7} else 1) + len({N})  + N

## a tensor
factor = torch.tensor([3., N])
def part(x): return x * factor[1]

## a function of another module
# def f(x): return x * N
def part(x): return other.f(x)

## a number of another module
# factor = N
def part(x): return x * other.factor

## a function that another one calls
# def g(x): return x * N
# def f(x): return g(x)
def part(x): return other.f(x)

## an import inside
# def f(x): return x * N
def part(x):
    import other_module as o
    return o.f(x)

## a name imported inside
# def f(x): return x * N
def part(x):
    from other_module import f
    return f(x)

## a name that is computed
# def far(x): return x * N
def part(x): return getattr(other, 'f' + str(x.dim())[:0] + 'ar')(x)

## a module in a closure
# def f(x): return x * N
def outer(m):
    return lambda x: m.f(x)
part = outer(other)

## a module as an attribute
# def f(x): return x * N
class P:
    def __init__(self, m): self.m = m
    def __call__(self, x): return self.m.f(x)
part = P(other)

## a closure
def outer(n):
    return lambda x: x * n
part = outer(N)

## a decorator
def times(n):
    def of(f):
        @functools.wraps(f)
        def g(x): return n * f(x)
        return g
    return of
@times(N)
def part(x): return x

## a decorator of torch
@torch.no_grad()
def inner(x): return x * N
def part(x): return inner(x)

## a decorator around a function of torch
def times(f):
    @functools.wraps(f)
    def g(x): return N * f(x)
    return g
part = times(torch.nn.functional.softplus)

## partial
part = functools.partial(lambda n, x: x * n, N)

## partial by name
part = functools.partial(lambda x, n: x * n, n=N)

## an attribute of a function
def part(x): return x * part.n
part.n = N

## a bound method
class P:
    def __init__(self, n): self.n = n
    def f(self, x): return x * self.n
part = P(N).f

## a method
class P:
    def __call__(self, x): return x * N
part = P()

## an inherited method
class A:
    def f(self, x): return x * N
class P(A):
    def __call__(self, x): return super().f(x)
part = P()

## a class attribute
class P:
    n = N
    @classmethod
    def f(cls, x): return x * cls.n
def part(x): return P.f(x)

## a static method
class P:
    @staticmethod
    def f(x): return x * N
def part(x): return P.f(x)

## a property
class P:
    @property
    def n(self): return N
with_n = P()
def part(x): return x * with_n.n

## slots
class P:
    __slots__ = ('n',)
    def __init__(self, n): self.n = n
p = P(N)
def part(x): return x * p.n

## a dataclass
@dataclass(frozen=True)
class P:
    n: float = 1.0
p = P(N)
def part(x): return x * p.n

## a default of a dataclass
@dataclass
class P:
    n: float = N
def part(x): return x * P().n

## a buffer
class P(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('n', torch.tensor(float(N)), persistent=False)
    def forward(self, x): return x * self.n
part = P()

## a parameter
part = nn.Linear(1, 1, bias=False)
with torch.no_grad(): part.weight.fill_(N)
scale = part
def part(x): return scale(x[..., None])[..., 0]

## an attribute of a module
class P(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n
    def forward(self, x): return x * self.n
part = P(N)

## the code of a module
class P(nn.Module):
    def forward(self, x): return x * N
part = P()

## a module inside a module
class P(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n
    def forward(self, x): return x * self.n
part = nn.Sequential(nn.Identity(), P(N))

## a hook of a module
part = nn.Identity()
part.register_forward_hook(lambda module, args, out: out * N)

## a forward that was replaced
part = nn.Identity()
part.forward = lambda x: x * N

## recursion
def part(x, depth=2): return x * N if not depth else part(x, depth - 1)

## functions that call each other
def even(x, n): return x * N if not n else odd(x, n - 1)
def odd(x, n): return even(x, n - 1)
def part(x): return even(x, 2)

## an enumeration
class E(Enum):
    n = N
def part(x): return x * E.n.value

## a named tuple
P = namedtuple('P', 'n m')
p = P(N, 3)
def part(x): return x * p.n

## an exception
def part(x):
    try:
        raise ValueError
    except ValueError:
        return x * N
""")
HEADER = """
import functools, torch
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from torch import nn
"""


def module(name, source, **known):
    """A module of the user, as a fresh import or a reload makes it."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    vars(made).update(known)
    exec(HEADER + source, vars(made))
    return made


def metric(pieces):
    """A metric that is the sum of pieces, (name, N), each with modules of its own."""
    parts = []
    for number, (name, n) in enumerate(pieces):
        lines = PIECES[name].replace("N", str(n)).replace(f"{n}one", "None").splitlines()
        there = "\n".join(line[2:] for line in lines if line.startswith("# "))
        other = module("other_module", there)
        own = "\n".join(line for line in lines if not line.startswith("# "))
        parts.append(module(f"own_module_{number}", own, other=other).part)
    return lambda out: sum(part(out[:, -1, 3]).sum() for part in parts)


@pytest.fixture(autouse=True)
def own_modules():
    yield
    for name in [x for x in sys.modules if x.startswith(("own_module", "other_module"))]:
        del sys.modules[name]


def digest(pieces):
    made = metric(pieces)
    made(torch.ones(2, 3, 5))  # as effects does, before it reads the metric
    return Digests().of(made)


@pytest.mark.parametrize("name", PIECES)
def test_the_value_of_each_piece_counts(name):
    values = [metric([(name, n)])(torch.ones(1, 3, 5)) for n in (5, 7)]
    assert values[0] != values[1], "the piece does not depend on N"
    assert digest([(name, 5)]) == digest([(name, 5)]) != digest([(name, 7)])


@given(st.data())
def test_a_metric_is_the_same_only_if_every_piece_is(data):
    names = data.draw(st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4))
    names = [x for x in names if "import" not in x] or ["a closure"]  # they share sys.modules
    pieces = [(name, data.draw(st.integers(2, 97))) for name in names]
    at = data.draw(st.integers(0, len(pieces) - 1))
    name, n = pieces[at]
    changed = [*pieces[:at], (name, n + data.draw(st.integers(1, 5))), *pieces[at + 1 :]]
    assert digest(pieces) == digest(pieces) != digest(changed)


OPAQUE = sections("""
## a file
def part(x): return x * len(open('f').read())

## a setting
import os
def part(x): return x * float(os.getenv('X'))

## a clock
import time
def part(x): return x * time.time()

## a random number
import random
def part(x): return x * random.random()

## a tensor in a file
def part(x): return x * torch.load('f')

## a path
from pathlib import Path
f = Path('f')
def part(x): return x * len(f.read_text())

## text that is run
def part(x): return eval('x * 2')

## a stream
import io
f = io.StringIO('3')
def part(x): return x * float(f.getvalue())

## an iterator
f = iter([1, 2, 3])
def part(x): return x * next(f)

## a generator
f = torch.Generator()
def part(x): return x * torch.rand((), generator=f)

## a cache
@functools.cache
def f(): return 3
def part(x): return x * f()

## a lock
import threading
f = threading.Lock()
def part(x): return x * f.locked()

## a pickle of its own
class P:
    n = 3
    def __reduce__(self): return P, ()
p = P()
def part(x): return x * p.n
""")


@pytest.mark.parametrize("name", OPAQUE)
def test_what_may_read_more_has_no_digest(name):
    with pytest.raises(Undigested, match=r" of .* is "):
        Digests().of(module("own_module", OPAQUE[name]).part)


def test_a_digest_does_not_depend_on_what_was_read_before():
    """Also of classes and functions that refer to each other."""
    sources = [
        "class P:\n    def f(self): return super().__init__() or P\n    def g(self): return Q\n"
        "class Q(P):\n    def f(self): return super().f()\n",
        "def a(): return b, c\ndef b(): return c, a\ndef c(): return a\n",
    ]
    for source in sources:
        names = ("P", "Q") if "class" in source else ("a", "b", "c")
        one = [Digests().of(vars(module("own_module", source))[name]) for name in names]
        for order in (names, names[::-1]):
            made, digests = module("own_module", source), Digests()
            read = {name: digests.of(vars(made)[name]) for name in order}
            assert [read[name] for name in names] == one


def test_a_replaced_function_of_a_package_counts(monkeypatch):
    plain = Digests().of(nn.Linear(2, 3).forward.__func__), Digests().of(nn.GELU())
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x)
    assert Digests().of(nn.GELU()) != plain[1]
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: args[0])
    assert Digests().of(torch.nn.functional.softmax) != Digests().of(nn.GELU())


# -------------------------------------------------------------------------------------- the file


def model():
    torch.manual_seed(0)
    made = Decoder(Config(words=13, d=12, layers=2, heads=3, context=16)).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(2.0)
    return made


def ids():
    return torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(2))


def runs_of(net, call):
    """What a call returns, and how often the model ran."""
    runs = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: runs.append(1) if module is net else None
    )
    try:
        return call(), len(runs)
    finally:
        hook.remove()


def test_a_metric_of_the_same_pieces_is_continued(tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"
    pieces = [(name, 3) for name in sorted(PIECES) if "import" not in name]

    def call():
        return ch.effects(net, ids(), metric(pieces), at_once=1, estimate=False, to=file)

    (first, many), (again, one) = runs_of(net, call), runs_of(net, call)
    assert (many, one) == (1 + 6, 1) and first == again


def test_a_function_that_was_reloaded_is_another_metric(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source, file = tmp_path / "other_module.py", tmp_path / "effects.jsonl"
    source.write_text("def zero(out): return 0 * out.sum()")
    other, net = importlib.import_module("other_module"), model()

    def call():
        return ch.effects(net, ids(), lambda out: other.zero(out), estimate=False, to=file)

    call()
    importlib.reload(other)
    assert runs_of(net, call)[1] == 1
    source.write_text("def zero(out): return 0 * out.sum() - 0 * out.amax()")
    importlib.invalidate_caches()
    importlib.reload(other)
    with pytest.raises(BadValue, match="has other effects"):
        call()


def test_what_cannot_be_compared_is_measured_anew(tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"
    handle = iter([])

    def call(metric, at_once=1):
        return ch.effects(net, ids(), metric, at_once=at_once, estimate=False, to=file)

    def total(out):
        assert not list(handle)
        return out[:, -1, 3].sum()

    says = "for the metric: handle of .*total is a list_iterator, which cannot be compared"
    for _ in range(2):
        with pytest.warns(UserWarning, match=says):
            found, count = runs_of(net, lambda: call(total))
        assert count == 1 + 6
    assert [e.exact for e in found] == [
        e.exact for e in ch.effects(net, ids(), lambda out: out[:, -1, 3].sum(), at_once=1)
    ]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 1 + 2 * 6 and {line["edits"] for line in lines[1:]} == {None}
    assert lines[0]["digests"]["metric"] is None


def doubling(n):
    """A class of edits as a notebook defines it: again, with the same name, and other code."""

    class doubles(ch.edits.scale):
        def edit_output(self, out, problem, inputs, site):
            return out * n

    return doubles


def test_an_edit_that_was_defined_again_is_another_one(tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"

    def call(n):
        edit = doubling(n)(1.0, layers=[0])
        return ch.effects(net, ids(), edits={"it": edit}, at_once=1, estimate=False, to=file)

    assert runs_of(net, lambda: call(2.0))[1] == 2
    assert runs_of(net, lambda: call(2.0))[1] == 1
    assert call(3.0) == ch.effects(
        net, ids(), edits={"it": doubling(3.0)(1.0, layers=[0])}, at_once=1, estimate=False
    )


@dataclass
class Cut:
    """Inputs that hold more than tensors."""

    at: int


class WithMore(nn.Module):
    """A model with code, an attribute, a buffer and a setting of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.config, self.factor = model(), {"scale": 1.0}, 1.0
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    def forward(self, input_ids, cut=None):
        return self.net(input_ids) * self.factor * self.config["scale"] + self.shift


@pytest.mark.parametrize(
    "change",
    [
        lambda net, inputs: net.config.update(scale=2.0),
        lambda net, inputs: setattr(net, "factor", 3.0),
        lambda net, inputs: net.shift.add_(1.0),
        lambda net, inputs: net.net.register_forward_hook(lambda module, args, out: out * 5.0),
        lambda net, inputs: setattr(net, "forward", functools.partial(net.forward, cut=3)),
        lambda net, inputs: inputs.update(cut=Cut(4)),
        lambda net, inputs: inputs["input_ids"].add_(1).remainder_(13),
        lambda net, inputs: net.net.train(),
    ],
)
def test_a_changed_model_or_input_is_another_question(change, tmp_path):
    """Even if the metric of the unedited run is the same number."""
    net, inputs, file = WithMore().eval(), {"input_ids": ids(), "cut": Cut(3)}, tmp_path / "file"

    def call():
        zero = lambda out: out.sum() * 0  # noqa: E731
        return ch.effects(net, inputs, zero, at_once=1, estimate=False, to=file)

    call()
    assert runs_of(net, call)[1] == 1
    change(net, inputs)
    with pytest.raises(BadValue, match="has other effects"):
        call()


def test_a_block_of_edits_around_the_call_is_another_question(tmp_path):
    net, file = model(), tmp_path / "file"

    def call(**more):
        zero = lambda out: out.sum() * 0  # noqa: E731
        return ch.effects(net, ids(), zero, at_once=1, estimate=False, **more)

    call(to=file)
    with ch.intervene(net, [ch.edits.ablate(layers=[1], heads=[2])]):
        with pytest.raises(BadValue, match="has other effects"):
            call(to=file)


def test_a_part_that_failed_before_has_the_same_digest():
    digests = Digests()
    source = "f = iter([])\ndef a(): return b, c\ndef b(): return a\ndef c(): return f\n"
    made = module("own_module", source)
    for _ in range(2):
        with pytest.raises(Undigested, match="f of c is a list_iterator"):
            digests.of(made.a)
    made.f = 3
    assert digests.of(made.b) == Digests().of(made.b)


@pytest.mark.parametrize("slots", [False, True])
def test_dataclasses_are_their_fields(slots):
    @dataclass(frozen=True, slots=slots)
    class Setting:
        at: int
        factor: torch.Tensor

    one, same, other = (Setting(3, torch.tensor(n)) for n in (1.0, 1.0, 2.0))
    assert Digests().of(one) == Digests().of(same) != Digests().of(other)


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (lambda: functools.partial(torch.sum, dim=None), "sum"),
        (lambda: functools.partial(lambda n, out: n * out[:, -1].sum(), 3), "<lambda>"),
        (lambda: WithMore(), "WithMore"),
    ],
)
def test_the_name_of_a_metric_has_no_address_and_no_numbers(metric, name, tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"

    def call():
        with torch.no_grad():
            counted = metric()
        if isinstance(counted, nn.Module):
            counted.forward = torch.sum
        return ch.effects(net, ids(), counted, at_once=1, estimate=False, to=file)

    first, (again, count) = call(), runs_of(net, call)
    assert count == 1 and first == again and first.metric == name
