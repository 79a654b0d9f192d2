import pkgutil
from types import ModuleType

import d9d_modules


def test_every_public_name_is_listed_once() -> None:
    assert len(d9d_modules.__all__) == len(set(d9d_modules.__all__))
    assert all(hasattr(d9d_modules, name) for name in d9d_modules.__all__)


def test_no_name_hides_a_module() -> None:
    modules = [module.name for module in pkgutil.iter_modules(d9d_modules.__path__)]
    assert len(modules) > 10
    assert all(hasattr(d9d_modules, name) for name in d9d_modules.__all__)  # imports the modules
    assert [name for name in modules if not isinstance(vars(d9d_modules).get(name, d9d_modules), ModuleType)] == []
