"""Docstrings of public names say what the code does: arguments, results, errors, and examples that run."""

import ast
import doctest
import inspect
import re
import textwrap
from types import FunctionType

import pytest
from sphinx.ext.napoleon import Config, GoogleDocstring

import hf_striped

SECTION = re.compile(r"^([A-Z]\w+):$")
ENTRY = re.compile(r"^    (\*{0,2}\w+): ", re.MULTILINE)


def is_ours(thing) -> bool:
    return thing.__module__.split(".")[0] == "hf_striped"


def public_objects():
    """Name, documented object, function that runs, and class it belongs to, of all that is public."""
    for name in hf_striped.__all__:
        value = getattr(hf_striped, name)
        if not inspect.isclass(value):
            yield name, value, value, None
            continue
        yield name, value, vars(value).get("__init__"), value
        for member, found in vars(value).items():
            function = found.fget if isinstance(found, property) else found
            if isinstance(function, FunctionType) and re.match(r"[a-z]|__call__$", member):
                yield f"{name}.{member}", found, function, value


OBJECTS = {name: rest for name, *rest in public_objects()}
FUNCTIONS = {name: rest for name, rest in OBJECTS.items() if rest[1] is not None}
CALLS = [name for name, rest in FUNCTIONS.items() if not isinstance(rest[0], property)]
each_object = pytest.mark.parametrize("name", OBJECTS)
each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_call = pytest.mark.parametrize("name", CALLS)


def sections(documented) -> dict[str, str]:
    """The sections of a docstring in Google style, by their heads."""
    found, head = {}, ""
    for line in inspect.cleandoc(documented.__doc__ or "").splitlines():
        if match := SECTION.match(line):
            head = match[1]
        elif line and not line.startswith(" "):
            head = ""
        found[head] = found.get(head, "") + line + "\n"
    return found


def entries(documented, head: str) -> list[str]:
    return ENTRY.findall(sections(documented).get(head, ""))


def arguments(function) -> list[str]:
    """As a docstring writes them, without `self`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = [
        stars.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values()
    ]
    return found[1:] if found[:1] == ["self"] else found


def syntax(function) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def errors(node: ast.expr) -> set[str]:
    """Names of the errors that a `raise` of this expression may raise."""
    node = node.func if isinstance(node, ast.Call) else node
    return {
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and part.id[0].isupper()
    }


def callee(node: ast.Call, function, owner):
    """The function of this package that a call runs, where its name says which."""
    target = node.func
    if isinstance(target, ast.Name):
        found = function.__globals__.get(target.id)
    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        base = owner if target.value.id == "self" else function.__globals__.get(target.value.id)
        found = inspect.unwrap(getattr(base, target.attr, None)) if inspect.isclass(base) else None
        found = getattr(found, "__func__", found)
    else:
        found = None
    return found if isinstance(found, FunctionType) and is_ours(found) else None


def raised(function, owner, seen: set) -> set[str]:
    """Names of the errors that `function`, or a function of this package that it calls, raises."""
    if function in seen:
        return set()
    seen.add(function)
    found = raised_directly(function)
    for node in ast.walk(syntax(function)):
        if isinstance(node, ast.Call) and (called := callee(node, function, owner)):
            found |= raised(called, owner, seen)
    return found


def raised_directly(function) -> set[str]:
    statements = (n for n in ast.walk(syntax(function)) if isinstance(n, ast.Raise) and n.exc)
    return set().union(*(errors(statement.exc) for statement in statements))


def returns_something(function) -> bool:
    annotation = inspect.signature(function).return_annotation
    if annotation is not inspect.Signature.empty:
        return annotation is not None
    return any(
        isinstance(n, ast.Return) and n.value is not None for n in ast.walk(syntax(function))
    )


def overrides(name: str, owner) -> bool:
    """Whether it is a method of a base class outside this package, which documents its arguments."""
    member = name.partition(".")[2]
    return bool(member) and any(member in vars(b) for b in owner.__mro__[1:] if not is_ours(b))


@each_object
def test_each_public_name_says_in_a_sentence_of_its_own_what_it_is(name):
    documented = OBJECTS[name][0]
    assert re.match(r"\S.*\S", documented.__doc__ or ""), name


@each_call
def test_arguments_are_those_of_the_signature_in_its_order(name):
    documented, function, owner = FUNCTIONS[name]
    said = entries(documented, "Args")
    if said or not overrides(name, owner):
        assert said == arguments(function)


@each_call
def test_what_is_returned_is_told_exactly_if_something_is(name):
    documented, function, _ = FUNCTIONS[name]
    told = bool(sections(documented).get("Returns"))
    assert told == (not inspect.isclass(documented) and returns_something(function))


@each_function
def test_the_site_takes_no_sentence_with_a_colon_for_a_type(name):
    documented = FUNCTIONS[name][0]
    what = "property" if isinstance(documented, property) else "function"
    text = inspect.cleandoc(documented.__doc__)
    rendered = str(GoogleDocstring(text, Config(), what=what, name=name))
    assert ":rtype:" not in rendered and not re.search("^:type:", rendered, re.MULTILINE), rendered


@each_function
def test_errors_are_those_that_the_code_raises(name):
    documented, function, owner = FUNCTIONS[name]
    said = entries(documented, "Raises")
    assert len(set(said)) == len(said)
    assert raised_directly(function) <= set(said)
    if not isinstance(documented, property):
        ours = {error for error in said if error in hf_striped.__all__}
        assert ours == raised(function, owner, set())


@each_object
def test_examples_run_and_show_what_they_print(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.cleandoc(OBJECTS[name][0].__doc__ or "")
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    shown = []
    doctest.DocTestRunner(verbose=False).run(example, out=shown.append)
    assert not shown, "".join(shown)


def test_whatever_is_not_an_error_class_has_an_example():
    errors = set(hf_striped.errors.__dict__)
    names = [name for name in hf_striped.__all__ if name not in errors]
    assert [n for n in names if ">>> " not in sections(OBJECTS[n][0]).get("Example", "")] == []
