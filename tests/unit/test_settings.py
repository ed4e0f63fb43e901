"""A setting means one thing wherever it is written, and a misspelt one is told with the name that was meant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvgate.core.fairness import FairRule
from kvgate.core.tenant import Limits, OnOverflow, Quota, Share, Tenant, Tier
from kvgate.settings import (
    RELOADABLE,
    BadSettings,
    FairnessSettings,
    Settings,
    described,
    load,
    load_tenants,
    reloaded,
)

DIGEST, OTHER = "a" * 64, "b" * 64
OWNS = 'tier = "guaranteed"\nguaranteed_ratio = {}\n'


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVGATE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str, name: str = "kvgate.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(config: Path | None, flags: dict[str, Any] | None = None) -> str:
    with pytest.raises(BadSettings) as caught:
        load(config, flags or {})
    return str(caught.value)


# -- precedence


def test_without_anything_the_defaults_are_in_force() -> None:
    found = load(None, {})
    assert found == Settings(flags={}, file={})  # type: ignore[call-arg]  # as `load` does
    assert (found.listen, found.engine.url, found.engine.kv_topology) == ("127.0.0.1:8600", None, "auto")
    assert (found.engine.on_undersized, found.http.body_bytes_max, found.store.url) == (
        "refuse",
        8 * 1024 * 1024,
        None,
    )


def test_a_variable_overrides_the_file_and_a_flag_both(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field by field: what one source does not name stays as the other said."""
    path = config(
        'listen = "127.0.0.1:1"\nadmin_listen = "127.0.0.1:2"\nanonymous_tenant = "file"\n'
        '[engine]\nurl = "http://file"\nmargin_tokens = 1\npool_tokens = 10\ndrain_max_s = 7\n'
    )
    monkeypatch.setenv("KVGATE_ANONYMOUS_TENANT", "variable")
    monkeypatch.setenv("KVGATE_ADMIN_LISTEN", "127.0.0.1:3")
    monkeypatch.setenv("KVGATE_ENGINE__URL", "http://variable")
    monkeypatch.setenv("KVGATE_ENGINE__MARGIN_TOKENS", "2")
    found = load(path, {"anonymous_tenant": "flag", "engine": {"url": "http://flag"}})
    assert (found.listen, found.admin_listen, found.anonymous_tenant) == ("127.0.0.1:1", "127.0.0.1:3", "flag")
    engine = found.engine
    assert (engine.url, engine.margin_tokens, engine.pool_tokens, engine.drain_max_s) == ("http://flag", 2, 10, 7)


def test_a_whole_section_may_stand_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_ENGINE", '{"url": "http://x", "margin_tokens": 3}')
    monkeypatch.setenv("KVGATE_ENGINE__MARGIN_TOKENS", "4")
    found = load(None, {})
    assert (found.engine.url, found.engine.margin_tokens) == ("http://x", 4)


def test_the_store_lives_beside_the_configuration(config: Any, tmp_path: Path) -> None:
    """Wherever the command is run from; named, it is where it is named."""
    assert load(config(""), {}).store.data_dir == tmp_path / ".kvgate"
    assert load(config('[store]\ndata_dir = "/data"'), {}).store.data_dir == Path("/data")
    assert load(None, {}).store.data_dir is None


def test_settings_do_not_change_once_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(None, {}).listen = "x:1"  # type: ignore[misc]  # the point of the test


def test_a_key_is_not_shown_in_a_repr() -> None:
    """Settings end up in tracebacks and logs."""
    assert "sk-engine" not in repr(load(None, {"engine": {"api_key": "sk-engine"}}))


# -- mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('lisen = "x:1"', "lisen is unknown; did you mean listen?"),
        ('[engine]\nurll = "http://x"', "engine.urll is unknown; did you mean url?"),
        ("[engine]\npool_token = 5", "engine.pool_token is unknown; did you mean pool_tokens?"),
        ("[engin]\nx = 1", "engin is unknown; did you mean engine?"),
        ("[http]\nzzz = 1", "http.zzz is unknown; known here: body_bytes_max"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_known_one(config: Any, text: str, said: str) -> None:
    """And with the file's name."""
    path = config(text)
    message = refused(path)
    assert said in message
    assert message.startswith(f"{path}: ")


def test_an_unknown_flag_is_an_error_too() -> None:
    assert "engine.urll is unknown" in refused(None, {"engine": {"urll": "x"}})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVGATE_LISEN", "KVGATE_LISTEN"),
        ("KVGATE_ENGINE_URL", "KVGATE_ENGINE__URL"),
        ("KVGATE_ENGINE__URLL", "KVGATE_ENGINE__URL"),
        ("KVGATE_HTTP__BODY_BYTE_MAX", "KVGATE_HTTP__BODY_BYTES_MAX"),
    ],
)
def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch, name: str, nearest: str) -> None:
    """One underscore too few would else leave the default in force without a word."""
    monkeypatch.setenv(name, "1")
    assert refused(None) == f"the variable {name} is no setting; did you mean {nearest}?"


def test_variables_of_others_are_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVGATE_MODEL", "KVGATE_CACHE", "KVGATEX", "OTHER_LISTEN"):
        monkeypatch.setenv(name, "1")
    load(None, {})


@pytest.mark.parametrize("value", ["nonsense", "{", "[]", '"x"', "{'url': 1}"])
def test_a_section_that_is_no_object_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("KVGATE_ENGINE", value)
    assert "engine" in refused(None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listen", '"8600"'),
        ("listen", '":8600"'),
        ("listen", '"host:"'),
        ("listen", '"host:123456"'),
        ("listen", '"host:65536"'),
        ("admin_listen", '"127.0.0.1:99999"'),
        ("listen", '"::1:8600"'),
        ("listen", "8600"),
        ("engine.context_tokens_min", "0"),
        ("engine.context_tokens_min", '"many"'),
        ("engine.pool_tokens", "-1"),
        ("engine.pool_tokens", "1.5"),
        ("engine.pool_headroom_ratio", "1.0"),
        ("engine.pool_headroom_ratio", "-0.1"),
        ("engine.margin_tokens", "-1"),
        ("engine.drain_max_s", "0"),
        ("engine.kv_topology", '"both"'),
        ("engine.kind", '"vllm9"'),
        ("engine.on_undersized", '"ignore"'),
        ("engine.url", "5"),
        ("http.body_bytes_max", "1023"),
        ("http.body_timeout_s", "0"),
        ("http.write_timeout_s", "-1"),
        ("http.stop_grace_s", "-1"),
        ("engine", '"x"'),
        ("store", '"data_dir"'),
        ("store", '"x"'),
        ("store", "5"),
        ("http", "[]"),
    ],
)
def test_a_value_out_of_range_is_told_by_its_key(config: Any, key: str, value: str) -> None:
    """Never a traceback, and never the value of another key."""
    section, _, name = key.rpartition(".")
    text = f"[{section}]\n{name} = {value}" if section else f"{name} = {value}"
    assert key in refused(config(text))


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "0.0.0.0:65535", "[::1]:8600", "localhost:80", "gate.example:8600"]
)
def test_an_address_is_host_and_port(listen: str) -> None:
    assert load(None, {"listen": listen}).listen == listen


@pytest.mark.parametrize("content", [b"listen = ", b"\xff\xfe", b"a = 1\na = 2", b"[engine\n"])
def test_a_file_that_is_no_toml_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kvgate.toml"
    path.write_bytes(content)
    assert refused(path).startswith(f"{path} is not TOML")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.toml") == f"{tmp_path / 'none.toml'} cannot be read: No such file or directory"
    assert "cannot be read" in refused(tmp_path)


def test_several_mistakes_are_told_at_once(config: Any) -> None:
    message = refused(config('listen = "x"\n[engine]\nurll = 1\nmargin_tokens = -1\n'))
    assert all(key in message for key in ("listen", "engine.urll", "engine.margin_tokens"))


def test_every_setting_is_described_with_its_unit() -> None:
    """The reference is made of this; numbers of tokens, seconds and bytes say so."""
    found = list(described())
    assert {"listen", "engine.url", "http.body_timeout_s", "tenant.NAME.queue_max"} <= {name for name, *_ in found}
    assert all(text.endswith(".") for _, _, _, text in found)
    for name, _, _, text in found:
        if name.endswith("_s"):
            assert "econds" in text, name
        if "_tokens" in name or name.endswith("tokens_max"):
            assert "okens" in text, name


# -- tenants


# -- read anew while the gate runs


def test_what_may_change_comes_into_force_and_the_rest_is_named(config: Any) -> None:
    before = load(config('[http]\nbody_bytes_max = 2000\n[engine]\nurl = "http://a:1"'), {"listen": "127.0.0.1:1"})
    found = load(
        config('anonymous_tenant = "x"\n[http]\nbody_timeout_s = 5\n[engine]\nurl = "http://b:1"\npool_tokens = 9'),
        {},
    )
    now = reloaded(before, found)
    assert now.changed == ("anonymous_tenant", "engine.pool_tokens", "http.body_bytes_max", "http.body_timeout_s")
    assert now.needs_restart == ("listen", "engine.url")
    assert (now.settings.anonymous_tenant, now.settings.engine.pool_tokens) == ("x", 9)
    assert (now.settings.http.body_bytes_max, now.settings.http.body_timeout_s) == (8 * 1024 * 1024, 5)
    assert (now.settings.listen, now.settings.engine.url) == ("127.0.0.1:1", "http://a:1")
    again = reloaded(now.settings, found)
    assert (again.changed, again.needs_restart) == ((), now.needs_restart)
    assert reloaded(now.settings, before).needs_restart == ()


def test_every_reloadable_setting_is_one() -> None:
    assert {name for name, *_ in described()} > RELOADABLE


def tenants(config: Any, text: str) -> dict[str, tuple[Tenant, tuple[str, ...] | None]]:
    return load_tenants(config(text, "tenants.toml"))


def refused_tenants(config: Any, text: str) -> str:
    with pytest.raises(BadSettings) as caught:
        tenants(config, text)
    return str(caught.value)


def test_a_tenants_file_declares_limits_and_quota(config: Any) -> None:
    text = f"""
    [tenant.acme]
    keys_sha256 = ["{DIGEST}", "{OTHER}"]
    models = ["small"]
    context_tokens_max = 2048
    output_tokens_min = 2
    output_tokens_default = 64
    on_overflow = "clamp"
    concurrency_max = 3
    kv_tokens_max = 4096
    queue_max = 0
    queue_timeout_s = 1.5
    [tenant."b.c-d_e"]
    [tenant.closed]
    keys_sha256 = []
    """
    found = tenants(config, text)
    assert found["acme"] == (
        Tenant(
            "acme",
            Limits(2048, 2, 64, OnOverflow.CLAMP),
            Quota(concurrency_max=3, kv_tokens_max=4096, queue_max=0, queue_timeout_s=1.5),
            frozenset({"small"}),
        ),
        (DIGEST, OTHER),
    )
    assert found["b.c-d_e"] == (Tenant("b.c-d_e"), None)
    assert found["closed"] == (Tenant("closed"), ())


def test_the_defaults_of_file_and_core_are_the_same(config: Any) -> None:
    """A tenant that the file leaves bare is the bare Tenant."""
    assert tenants(config, "[tenant.a]")["a"][0] == Tenant("a")


def test_an_empty_tenants_file_declares_nobody(config: Any) -> None:
    assert tenants(config, "") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenant.a]\nqueue_mx = 1", "tenant.a.queue_mx is unknown; did you mean queue_max?"),
        ("[tenant.models]\nqueue_mx = 1", "tenant.models.queue_mx is unknown; did you mean queue_max?"),
        ("[tenat.a]", "tenat is unknown; did you mean tenant?"),
        ('[tenant."a b"]', "tenant.a b"),
        ('[tenant.""]', "tenant."),
        (f"[tenant.{'a' * 65}]", "tenant.aaa"),
        ('[tenant."-"]', "tenant.-"),
        ('[tenant.a]\nkeys_sha256 = ["abc"]', "tenant.a.keys_sha256.0"),
        (f'[tenant.a]\nkeys_sha256 = ["{DIGEST.upper()}"]', "tenant.a.keys_sha256.0"),
        (f'[tenant.a]\nkeys_sha256 = "{DIGEST}"', "tenant.a.keys_sha256"),
        ("[tenant.a]\ncontext_tokens_max = 0", "tenant.a.context_tokens_max"),
        ("[tenant.a]\noutput_tokens_min = 0", "tenant.a.output_tokens_min"),
        ("[tenant.a]\noutput_tokens_default = 0", "tenant.a.output_tokens_default"),
        ("[tenant.a]\nconcurrency_max = 0", "tenant.a.concurrency_max"),
        ("[tenant.a]\nkv_tokens_max = 0", "tenant.a.kv_tokens_max"),
        ("[tenant.a]\nqueue_max = -1", "tenant.a.queue_max"),
        ("[tenant.a]\nqueue_timeout_s = 0", "tenant.a.queue_timeout_s"),
        ("[tenant.a]\nqueue_timeout_s = 3601", "tenant.a.queue_timeout_s"),
        ('[tenant.a]\non_overflow = "trimm"', "tenant.a.on_overflow"),
        ("[tenant.a]\nweight = 0", "tenant.a.weight"),
        ("[tenant.a]\nweight = 1001", "tenant.a.weight"),
        ('[tenant.a]\ntier = "gold"', "tenant.a.tier"),
        ('[tenant.a]\ntier = "guaranteed"', "go together; set both or neither"),
        ("[tenant.a]\nguaranteed_ratio = 0.5", "go together; set both or neither"),
        (
            f"[tenant.a]\n{OWNS.format(0.7)}[tenant.b]\n{OWNS.format(0.4)}",
            "together is 1.1, and there is only 1 to share (a 0.7, b 0.4)",
        ),
        ("tenant = 5", "tenant"),
        ("[tenant]\na = 5", "tenant.a"),
        (
            f'[tenant.a]\nkeys_sha256 = ["{DIGEST}"]\n[tenant.b]\nkeys_sha256 = ["{DIGEST}"]',
            "'a' and 'b' declare the same key",
        ),
    ],
)
def test_a_mistake_in_the_tenants_file_is_told(config: Any, text: str, said: str) -> None:
    assert said in refused_tenants(config, text)


def test_a_key_instead_of_its_hash_is_not_told_back(config: Any) -> None:
    """The mistake that everybody makes once must not print the key."""
    assert "sk-alpha" not in refused_tenants(config, '[tenant.a]\nkeys_sha256 = ["sk-alpha"]')


def test_one_key_twice_in_one_tenant_is_one_key(config: Any) -> None:
    tenants(config, f'[tenant.a]\nkeys_sha256 = ["{DIGEST}", "{DIGEST}"]')


def test_a_tenants_file_declares_shares(config: Any) -> None:
    """Weight, tier and guaranteed part; three thirds are a whole."""
    third = 'tier = "guaranteed"\nguaranteed_ratio = 0.333333\n'
    found = tenants(config, f"[tenant.a]\n{third}[tenant.b]\n{third}[tenant.c]\n{third}weight = 0.25\n[tenant.d]\n")
    assert found["c"][0].share == Share(0.25, Tier.GUARANTEED, 0.333333)
    assert found["d"][0].share == Share()


def test_prices_are_taken_in_whole_thousandths() -> None:
    assert Settings().fairness.rule(None) == FairRule()
    given = FairnessSettings(input_price=1.5, cached_input_price=0.1, output_price=3, bypass_max=0)
    assert given.rule(700) == FairRule(1500, 100, 3000, 0, 700)


def test_the_suites_own_name_is_no_tenants(tmp_path: Path) -> None:
    """What it holds and what such a tenant held would be one."""
    path = tmp_path / "tenants.toml"
    path.write_text("[tenant.kvgate-suite]\n")
    with pytest.raises(BadSettings, match="kvgate-suite: that name is the reuse suite's own"):
        load_tenants(path)
