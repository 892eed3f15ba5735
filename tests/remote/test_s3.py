"""Buckets as they are: addresses, secrets, what is sent without TLS, and servers that cannot."""

import sys
import threading
import time
import uuid
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.errors import BadInput
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.handshake import STORE_META
from keepwarm.remote.janitor import list_all
from keepwarm.remote.records import CLASSES
from keepwarm.remote.s3 import S3Address, S3Backend
from keepwarm.remote.tier import RemoteTier
from tests.kit.s3_server import rclone_server

SOON = 30.0
SHORT = 0.05


def take(n_bytes):
    return memoryview(bytearray(n_bytes))


@contextmanager
def bucket_that(answers):
    """A server that handles every request so; the headers of all are in the list."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self):
            seen.append((self.command, self.path, dict(self.headers)))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answers(self)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"s3://key@bucket/pre/fix?endpoint=http://127.0.0.1:{server.server_port}&region=here"
        with closing(open_backend(url, "secret")) as blobs:
            yield blobs, seen
        server.shutdown()


def answer(code, text=b""):
    def send(one):
        one.send_response(code)
        one.send_header("Content-Length", str(len(text)))
        one.send_header("ETag", '"1"')
        one.end_headers()
        one.wfile.write(text)

    return send


def test_without_tls_the_payload_is_signed():
    with bucket_that(answer(200)) as (blobs, seen):
        blobs.put("a/x.d", [b"bytes"], SOON)
    ((method, path, headers),) = seen
    headers = {name.lower(): value for name, value in headers.items()}
    assert (method, path) == ("PUT", "/bucket/pre/fix/a/x.d")
    assert headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"
    assert "key/" in headers["authorization"]
    assert "/here/s3/" in headers["authorization"]
    assert headers["if-none-match"] == "*"


@pytest.mark.parametrize(("code", "n_tries"), [(500, 1), (503, 2)])
def test_only_what_is_throttled_is_tried_again_and_once(code, n_tries):
    with bucket_that(answer(code)) as (blobs, seen):
        for call in (
            lambda: blobs.sizes(["a/x.d"], SOON),
            lambda: blobs.read("a/x.d", take, SOON),
            lambda: blobs.put("a/x.d", [b"x"], SOON),
            lambda: blobs.list_names("a", SOON),
        ):
            with pytest.raises(CallError, match=str(code)):
                call()
    assert len(seen) == 4 * n_tries


def test_a_throttled_call_succeeds_in_its_time():
    codes = [503, 200]

    def throttle(one):
        answer(codes.pop(0))(one)

    with bucket_that(throttle) as (blobs, seen):
        assert blobs.put("a/x.d", [b"bytes"], SOON)
    assert [method for method, *_ in seen] == ["PUT", "PUT"]
    with bucket_that(answer(503)) as (blobs, _), pytest.raises(CallError, match="40 ms"):
        blobs.put("a/x.d", [b"bytes"], 0.04)  # sooner than it is tried again


def test_many_are_deleted_in_one_request():
    """So that no question waits behind them."""
    names = [f"a/{number}.d" for number in range(256)]
    keys = "".join(f"<Deleted><Key>pre/fix/{name}</Key></Deleted>" for name in names)
    with bucket_that(answer(200, f"<DeleteResult>{keys}</DeleteResult>".encode())) as (blobs, seen):
        blobs.delete(names, SOON)
    assert [(method, path) for method, path, _ in seen] == [("POST", "/bucket?delete")]


def test_a_server_without_that_request_is_asked_one_by_one():
    def refuse(one):
        answer(501 if one.command == "POST" else 204)(one)

    with bucket_that(refuse) as (blobs, seen):
        blobs.delete(["a/1.d", "a/2.d"], SOON)
    paths = {(method, path) for method, path, _ in seen[1:]}
    assert paths == {("DELETE", f"/bucket/pre/fix/a/{number}.d") for number in (1, 2)}
    with bucket_that(answer(503)) as (blobs, seen), pytest.raises(CallError, match="503"):
        blobs.delete(["a/1.d", "a/2.d"], SOON)
    assert {method for method, *_ in seen} == {"POST"}, "a store that has no time gets no more work"


def test_a_name_that_is_gone_does_not_keep_others_from_being_deleted():
    def refuse(one):
        is_gone = one.path.endswith("/a/1.d")
        answer(501 if one.command == "POST" else 404 if is_gone else 204)(one)

    names = [f"a/{number}.d" for number in range(1, 41)]
    with bucket_that(refuse) as (blobs, seen):
        blobs.delete(names, SOON)
    paths = {path for method, path, _ in seen if method == "DELETE"}
    assert paths == {f"/bucket/pre/fix/{name}" for name in names}


def test_what_rules_by_age_take_and_all_machines_need_is_put_back(bucket):
    """Within a minute: the mark and the list of classes."""
    address, _, options = bucket.partition("?")
    address = f"{address}/{uuid.uuid4().hex}?{options}"
    with (
        closing(open_backend(address)) as place,
        closing(RemoteTier(open_backend(address), "cpu-mlx-0.1")) as tier,
    ):
        assert tier.health.wait_until_tried(SOON)
        needed = STORE_META, f"{CLASSES}/cpu-mlx-0.1"
        place.delete(needed, SOON)
        assert place.sizes(needed, SOON) == [None, None]
        tier._refresh(CallDeadline(SOON))
        assert None not in place.sizes(needed, SOON)


def test_a_janitor_lists_by_pages(bucket, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.s3.PAGE", 2)
    with closing(open_backend(bucket)) as blobs:
        names = [f"paged/{number}" for number in range(5)]
        for name in names:
            blobs.put(name, [b"x"], SOON)
        pages, list_page = [], blobs.list_page

        def noted(*args):
            pages.append(list_page(*args))
            return pages[-1]

        monkeypatch.setattr(blobs, "list_page", noted)
        assert [one.name for one in list_all(blobs, "paged")] == names
        assert [len(page) for page in pages] == [2, 2, 1, 0]


XML = b'<?xml version="1.0" encoding="UTF-8"?>\n'


@pytest.mark.parametrize(
    "answered",
    [
        answer(507),
        answer(403, XML + b"<Error><Code>QuotaExceeded</Code></Error>"),
        answer(403, XML + b"<Error><Code>AccessDenied</Code></Error>"),
    ],
    ids=["507", "quota", "read-only"],
)
def test_a_full_bucket_refuses_and_is_no_error(answered):
    with bucket_that(answered) as (blobs, _):
        assert not blobs.put("a/x.d", [b"x"], SOON)


@pytest.mark.parametrize("to", ["http", "file:///etc/hostname"])
def test_a_redirection_takes_neither_signature_nor_bytes_elsewhere(to):
    """Reads of another host are followed by the client; what comes back is verified like all."""

    def send_away(one):
        one.send_response(307)
        one.send_header("Location", target)
        one.send_header("Content-Length", "0")
        one.end_headers()

    with bucket_that(answer(200, b"<Error/>")) as (elsewhere, seen):
        target = elsewhere._store.config["endpoint"] if to == "http" else to
        target = target.replace("127.0.0.1", "localhost")
        with bucket_that(send_away) as (blobs, _):
            for call in (
                lambda: blobs.put("a/x.d", [b"x"], SOON),
                lambda: blobs.list_names("a", SOON),
                lambda: blobs.read("a/x.d", take, SOON),
            ):
                with suppress(CallError):
                    call()
    assert {method for method, _, _ in seen} <= {"GET"}
    assert not [name for *_, headers in seen for name in headers if "auth" in name.lower()]
    assert bool(seen) == (to == "http")


def test_a_wrong_secret_is_an_error_that_says_so():
    with (
        bucket_that(answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")) as (
            blobs,
            _,
        ),
        pytest.raises(CallError, match="SignatureDoesNotMatch"),
    ):
        blobs.read("a/x.d", take, SOON)


def trickle(one):
    one.send_response(200)
    one.send_header("Content-Length", "1000000")
    one.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
    one.end_headers()
    for _ in range(100):
        try:
            one.wfile.write(b"x")
        except OSError:
            return
        time.sleep(0.02)


def test_a_value_that_trickles_takes_no_longer_than_the_deadline():
    with bucket_that(trickle) as (blobs, _), pytest.raises(CallError, match="50 ms"):
        blobs.read("a/x.d", take, SHORT)


@pytest.mark.parametrize(
    "address",
    [
        "s3://Bucket",
        "s3://b",
        "s3://bucket/../x",
        "s3://bucket/a b",
        "s3://bucket?endpoint=host:9000",
        "s3://bucket?endpoint=https://host:port",
        "s3://bucket?endpoint=http://",
        "s3://bucket?secret=hunter2",
        "s3://bucket#hunter2",
    ],
)
def test_an_address_of_no_bucket_is_refused_in_one_sentence(address):
    with pytest.raises(BadInput, match=r"s3://|https://|letters, digits") as refused:
        open_backend(address)
    assert "hunter2" not in str(refused.value)


def test_an_endpoint_of_no_server_in_the_environment_is_refused_too(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(BadInput, match="AWS_ENDPOINT_URL"):
        open_backend("s3://bucket")


def test_credentials_in_the_environment_that_are_none_are_one_sentence(monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    with pytest.raises(BadInput, match=r"AWS_ variables .* SecretAccessKey; correct them\.$"):
        open_backend("s3://bucket")


def test_a_panic_of_the_client_is_a_failed_call():
    """As an endpoint that it cannot parse makes one; it is no Exception, and would end a thread."""
    address = S3Address("bucket", key_id="key", endpoint="http://")
    with closing(S3Backend(address, "secret")) as blobs, pytest.raises(CallError, match="valid"):
        blobs.sizes(["a/x.d"], SOON)


def test_without_the_extra_the_sentence_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "keepwarm.remote.s3", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(BadInput, match=r"install keepwarm\[s3\]"):
        open_backend("s3://bucket")


@pytest.mark.soak
def test_a_tier_says_so_too(tmp_path):
    """As a server opens it: the mark is looked at as well, and is read in part."""
    with rclone_server(tmp_path) as url:
        tier = RemoteTier(open_backend(url), "cpu-mlx-0.1")
        assert not tier.health.wait_until_tried(SOON)
        tier.close()
    assert "does not read parts" in tier.health.refused
