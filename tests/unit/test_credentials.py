"""Credentials are refused wherever a file or a command could hold one, and no message repeats them."""

from pathlib import Path

import pytest
import yaml

from tests.unit.config.test_load import GOOD, write
from yatt.checkpoint.store.store import open_store
from yatt.checkpoint.store.store_errors import errors_of_store
from yatt.cli.main import main
from yatt.config.load import load_run_config
from yatt.config.site import load_site
from yatt.credentials import is_secret_name, redacted_text, secret_option
from yatt.errors import ConfigError, StoreUnreachable

PLANTED = "wJalrXUtnFEMI/K7MDENG"

SECRET_NAMES = (
    "key", "secret", "token", "password", "sas_token", "account_key", "connection_string", "client_secret",
    "aws_secret_access_key", "aws_access_key_id", "secretAccessKey", "credential", "HF_TOKEN",
    "WANDB_API_KEY",
)  # fmt: skip
PLAIN_NAMES = (
    "profile", "endpoint_url", "anon", "requester_pays", "account_name", "region_name", "key_filename",
    "max_concurrency", "AWS_SHARED_CREDENTIALS_FILE", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "key_env",
    "VLLM_MAX_NUM_BATCHED_TOKENS", "NCCL_IB_PKEY", "",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_of_a_credential_is_recognised(name: str) -> None:
    assert is_secret_name(name)
    assert secret_option({"profile": "x", name: PLANTED}) == name
    assert secret_option({"client_kwargs": {name: PLANTED}}) == f"client_kwargs.{name}"


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_other_names_are_not_taken_for_credentials(name: str) -> None:
    assert not is_secret_name(name)
    assert not secret_option({name: "x"})


def test_values_that_select_a_method_are_no_credentials() -> None:
    assert not secret_option({"token": "google_default", "anon": True, "auth": False})


SECRET_URLS = (
    f"https://user:{PLANTED}@host/bucket", f"s3://AKIA:{PLANTED}@bucket/run",
    f"abfs://c@a.dfs.core.windows.net/run?sv=2022-11-02&sig={PLANTED}",
    f"https://bucket.s3.amazonaws.com/run?X-Amz-Signature={PLANTED}",
    f"https://h/run?X-Amz-Credential={PLANTED}", f"https://h/run?token={PLANTED}",
)  # fmt: skip
PLAIN_URLS = (
    "s3://bucket/run", "http://127.0.0.1:9000", "http://127.0.0.1:9000/b/name@1", "ssh://user@host/folder",
    "abfs://container@account.dfs.core.windows.net/run", "s3://bucket/run?versionId=abc", "/data/a:b@c",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/name@1",
)  # fmt: skip


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_url_with_a_credential_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    assert PLANTED not in redacted_text(f"GET {url}: refused")
    for settings in ({"checkpoint": {"url": url}}, {"run": {"dir": "r", "from_checkpoint": {"url": url}}}):
        with pytest.raises(ConfigError, match="contains a password or a signature") as caught:
            load_run_config([write(tmp_path, yaml.safe_dump(yaml.safe_load(GOOD) | settings))], [])
        assert PLANTED not in str(caught.value) and "AWS_ACCESS_KEY_ID" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        open_store(url, {})
    assert PLANTED not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket/run", {"endpoint_url": url})
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize("url", PLAIN_URLS)
def test_a_url_without_one_is_kept(url: str) -> None:
    assert redacted_text(f"GET {url}: refused") == f"GET {url}: refused"


BAD_VALUES = (PLANTED, [PLANTED], {"a": PLANTED}, f"{PLANTED}\ud800", f"{PLANTED}\0")


@pytest.mark.parametrize("value", BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_a_config_with_a_credential_is_refused_and_it_is_in_no_message(tmp_path: Path, value: object) -> None:
    file = write(tmp_path, GOOD)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).partition("\n")[0]
    (tmp_path / "over.yaml").write_text(f"checkpoint:\n  storage_options:\n    secret: {text}")
    for files, arguments in (
        ([file, tmp_path / "over.yaml"], []), ([file], [f"checkpoint.storage_options.secret={text}"]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"storage_options\.secret") as caught:
            load_run_config(files, arguments)
        assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    ("site", "named"),
    [
        (f"storage_options: {{secret: {PLANTED}}}", r"storage_options\.secret"),
        (f"checkpoint_url_prefix: https://a:{PLANTED}@h/x", "checkpoint_url_prefix"),
        (f"env: {{HF_TOKEN: {PLANTED}}}", r"env\.HF_TOKEN"),
        (f"env: {{HTTPS_PROXY: 'http://me:{PLANTED}@proxy'}}", r"env\.HTTPS_PROXY"),
        (f"env: {{HF_TOKEN: [{PLANTED}]}}", r"env\.HF_TOKEN"),
    ],
)  # fmt: skip
def test_a_site_file_has_no_credentials(tmp_path: Path, site: str, named: str) -> None:
    (tmp_path / "site.yaml").write_text(site)
    with pytest.raises(ConfigError, match=named) as caught:
        load_site(tmp_path / "site.yaml")
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize("options", [f"secret={PLANTED}", f"client_kwargs={{password: {PLANTED}}}"])
def test_a_commands_option_is_no_credential(
    options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["ckpt", "list", "--store", "s3://bucket/run", "--option", options]
    monkeypatch.setattr("sys.argv", ["yatt", *words])
    assert main() == 2
    said = capsys.readouterr()
    assert "is or contains a credential" in said.err and PLANTED not in said.err + said.out


def test_what_a_driver_says_is_redacted() -> None:
    with pytest.raises(StoreUnreachable) as caught, errors_of_store("bucket/x"):
        raise OSError(f"GET https://h/bucket?sig={PLANTED}&x=1 failed; AccountKey={PLANTED}; retry")
    assert PLANTED not in str(caught.value) and "&x=1 failed" in str(caught.value)


def test_lists_are_looked_into_and_a_password_may_contain_the_separator() -> None:
    assert secret_option({"fallbacks": [{"profile": "x"}, {"secret": PLANTED}]}) == "fallbacks.secret"
    assert secret_option({"urls": ["s3://b", f"https://u:{PLANTED}@h"]}) == "urls.1"
    assert secret_option({"urls": ["s3://b", "https://h"], "sizes": [1, 2]}) == ""
    assert redacted_text("https://u:p@ss@h/x") == "https://***@h/x"
    assert redacted_text(f"https://u:{PLANTED}@h/x") == "https://***@h/x"
