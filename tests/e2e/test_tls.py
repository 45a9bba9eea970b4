"""`phsa serve` with a certificate: what holds over plain sockets holds over TLS, too."""

import asyncio
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess

import pytest
import test_server
from conftest import run_phsa
from test_cli import write_gguf
from test_server import CONTEXT, Server, long_stream

pytest.importorskip("gguf")
if shutil.which("openssl") is None:
    pytest.skip("the program openssl makes the certificates", allow_module_level=True)

# The same tests, against the fixtures of this file.
for name in (
    "test_a_body_is_sent_after_a_continue",
    "test_a_client_that_does_not_read_is_left",
    "test_a_connection_serves_one_request_after_the_other",
    "test_a_half_sent_request_is_ended",
    "test_a_large_body_is_read",
    "test_a_request_that_comes_during_an_answer_is_answered_behind_it",
    "test_an_answer_ends_when_its_client_has_gone",
    "test_an_answer_ends_when_its_client_has_sent_more_and_gone",
    "test_old_clients_get_a_stream_without_chunks",
):
    globals()[name] = getattr(test_server, name)


def openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


def make_certificate(folder, name, days=30):
    """A certificate for this machine that vouches for itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    ask = ("-nodes", "-subj", f"/CN={name}", "-days", days, "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        *ask,
        "-keyout",
        key,
        "-out",
        certificate,
    )
    return certificate, key


class TlsServer(Server):
    def __init__(self, model, certificate, key, *args, **kwargs):
        self.context = ssl.create_default_context(cafile=certificate)
        super().__init__(model, "--tls-cert", certificate, "--tls-key", key, *args, **kwargs)

    def connect(self, timeout=60):
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=self.context)

    def wrap(self, raw):
        return self.context.wrap_socket(raw, server_hostname="127.0.0.1")

    def plain(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def server(tiny, files):
    with TlsServer(tiny, *files, "--weights", "f32", "--alias", "tiny") as running:
        yield running


@pytest.fixture
def impatient(tiny, files):
    waits = ("--header-timeout", 0.5, "--body-timeout", 0.5, "--write-timeout", 1, "--idle-timeout", 1)
    with TlsServer(tiny, *files, *waits, "--parallel", 1, "--queue", 1) as running:
        yield running


def test_clients_talk_to_it_and_streams_are_whole(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(
        base_url=f"https://localhost:{server.port}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=server.context),
    )
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    # Who reads over plain HTTP gets the same.
    assert whole == server.chat("Hello", max_tokens=40, temperature=0)["choices"][0]["message"]["content"]


def test_many_connections_at_once_get_what_a_lone_one_gets(server):
    aiohttp = pytest.importorskip("aiohttp")
    alone = server.complete("Bees", max_tokens=30)["choices"]
    body = {"prompt": "Bees", "max_tokens": 30, "temperature": 0}

    async def ask_all():
        connector = aiohttp.TCPConnector(ssl=server.context, limit=32)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask(stream):
                url = f"https://127.0.0.1:{server.port}/v1/completions"
                async with session.post(url, json={**body, "stream": stream}) as answer:
                    assert answer.status == 200
                    if not stream:
                        return (await answer.json())["choices"][0]["text"]
                    events = (await answer.text()).split("\n\n")
                    assert events[-2:] == ["data: [DONE]", ""]
                    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])

            return await asyncio.gather(*(ask(i % 2 == 1) for i in range(32)))

    assert asyncio.run(ask_all()) == [alone[0]["text"]] * 32


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_spoken_and_end_as_they_should(server, files, version):
    context = ssl.create_default_context(cafile=files[0])
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    # A connection that ends without TLS having ended is an error here.
    with context.wrap_socket(server.plain(), server_hostname="localhost", suppress_ragged_eofs=False) as raw:
        assert raw.selected_alpn_protocol() == "http/1.1"
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"".join(iter(lambda: raw.recv(65536), b"")).endswith(b'{"status":"ok"}')


def test_older_versions_are_refused(server, files):
    context = ssl.create_default_context(cafile=files[0])
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with server.plain() as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname="localhost")
    server.wait_for(lambda: any("TLS handshake failed" in line for line in server.lines))
    assert server.get("/health") == {"status": "ok"}


def test_a_plain_client_is_told(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/completions", b"x" * 300_000, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    assert answer.status == 400 and "https://" in error["message"] and error["code"] == "https_wanted"
    assert answer.headers["Connection"] == "close"


def hello(context):
    """The first bytes that a client of TLS sends."""
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    return out.read()


def test_a_handshake_that_is_not_done_is_ended(impatient):
    whole = hello(impatient.context)
    for sent in (b"", whole[:1], whole[:40], whole):
        with impatient.plain() as raw:
            raw.sendall(sent)
            while raw.recv(65536):  # until the server has had enough
                pass
        with impatient.plain() as raw:  # gone instead of slow
            raw.sendall(sent)
    with impatient.plain() as raw:
        raw.sendall(b"\x16\x03\x01\x00\x05garbage" * 20)
        while raw.recv(65536):
            pass
    impatient.wait_for(lambda: any("handshake failed: it took too long" in line for line in impatient.lines))
    impatient.wait_for(lambda: impatient.metric("phsa:connections") == 1)
    assert impatient.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_what_is_no_tls_any_more_ends_the_connection_and_no_other(server):
    raw = server.socket()
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert raw.recv(65536).startswith(b"HTTP/1.1 200")
    below = socket.socket(fileno=raw.detach())
    below.settimeout(30)
    below.sendall(b"\x17\x03\x03\x00\x20" + b"?" * 32)
    while below.recv(65536):
        pass
    below.close()
    # While an answer is streamed, too: then it ends.
    stream = long_stream(server, n=4)
    server.wait_for(lambda: server.metric("vllm:num_requests_running") == 4)
    below = socket.socket(fileno=stream.detach())
    below.sendall(b"\x17\x03\x03\x00\x20" + b"?" * 32)
    server.wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    below.close()
    assert server.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_sigterm_lets_answers_end(tiny, files):
    with TlsServer(tiny, *files, "--grace", 60) as server:
        stream = long_stream(server, max_tokens=1000, n=8)
        idle = server.socket()
        server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
        server.process.send_signal(signal.SIGTERM)
        assert idle.recv(10) == b""
        received = b"".join(iter(lambda: stream.recv(65536), b""))
        assert received.count(b'"finish_reason":"length"') == 8 and received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(20) == 0


def certificate_of(server):
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=30)


def test_a_hangup_reads_the_certificate_again(tiny, tmp_path):
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    texts = [[path.read_text() for path in pair] for pair in (first, second)]
    with TlsServer(tiny, *first) as server:
        old = server.socket()
        assert certificate_of(server).strip() == texts[0][0].strip()
        first[0].write_text(texts[1][0])
        server.process.send_signal(signal.SIGHUP)  # the key is still the old one
        server.wait_for(lambda: any("the key is not that of" in line for line in server.lines))
        assert certificate_of(server).strip() == texts[0][0].strip()
        first[1].write_text(texts[1][1])
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: any("was read again" in line for line in server.lines))
        assert certificate_of(server).strip() == texts[1][0].strip()
        # Connections that were there go on.
        old.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"".join(iter(lambda: old.recv(65536), b"")).endswith(b'{"status":"ok"}')


def test_files_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path, files):
    certificate, key = files
    other, other_key = make_certificate(tmp_path, "other")
    secret, empty, folder = tmp_path / "secret.key", tmp_path / "empty.pem", tmp_path / "folder"
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", secret)
    empty.write_text("")
    folder.mkdir()
    chain, both = tmp_path / "chain.pem", tmp_path / "both.pem"
    chain.write_text(other.read_text() + certificate.read_text())
    both.write_text(certificate.read_text() + key.read_text())
    wrong = [
        ((certificate, None), "give both"),
        ((None, key), "give both"),
        ((tmp_path / "missing.pem", key), "missing.pem"),
        ((certificate, tmp_path / "missing.key"), "missing.key"),
        ((folder, key), "folder"),
        ((empty, key), "BEGIN CERTIFICATE"),
        ((key, key), "BEGIN CERTIFICATE"),
        ((certificate, certificate), "BEGIN PRIVATE KEY"),
        ((certificate, empty), "BEGIN PRIVATE KEY"),
        ((certificate, other_key), "is not that of the first certificate"),
        ((chain, key), "is not that of the first certificate"),
        ((certificate, secret), "pass phrase"),
    ]
    for (cert, private), said in wrong:
        flags = (["--tls-cert", cert] if cert else []) + (["--tls-key", private] if private else [])
        done = run_phsa("serve", "-m", tmp_path / "no-model.gguf", "--port", 0, *flags)
        assert done.returncode in (1, 2) and said in done.stderr and "no-model" not in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
    # These are right, and then it is the model that is not there.
    for cert, private in ((certificate, key), (chain, other_key), (both, both)):
        done = run_phsa(
            "serve", "-m", tmp_path / "no-model.gguf", "--port", 0, "--tls-cert", cert, "--tls-key", private
        )
        assert "no-model" in done.stderr, done.stderr
    # With TLS, too, not everybody may use it.
    done = run_phsa("serve", "-m", "x", "--host", "0.0.0.0", "--tls-cert", certificate, "--tls-key", key)
    assert done.returncode == 2 and "--api-key" in done.stderr


def test_a_certificate_that_has_run_out_is_told(tmp_path, tiny):
    certificate, key = tmp_path / "old.pem", tmp_path / "old.key"
    openssl("ecparam", "-genkey", "-name", "prime256v1", "-out", key)
    request = tmp_path / "old.csr"
    openssl("req", "-new", "-key", key, "-subj", "/CN=old", "-out", request)
    openssl("x509", "-req", "-in", request, "-signkey", key, "-days", -1, "-out", certificate)
    done = run_phsa("serve", "-m", tmp_path / "no-model.gguf", "--tls-cert", certificate, "--tls-key", key)
    assert "has run out" in done.stderr
