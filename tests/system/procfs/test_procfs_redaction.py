import pytest

from gpuckpt.system import procfs


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--api-key", "S3"], ["--api-key", "***"]),
        (["--api-key", "k1", "k2", "--port", "1"], ["--api-key", "***", "***", "--port", "1"]),
        (["--api-key=S3", "x"], ["--api-key=***", "x"]),
        (["--hf-token", "S3", "model"], ["--hf-token", "***", "model"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
        (["--password", "-S3cret"], ["--password", "***"]),
        (["--token", "-v"], ["--token", "-v"]),
        (["--apiKey", "S3"], ["--apiKey", "***"]),
        (["--APIKey=S3"], ["--APIKey=***"]),
        (["token=S3"], ["token=***"]),
        (["WANDB_API_KEY=S3", "python"], ["WANDB_API_KEY=***", "python"]),
        (["AWS_SECRET_ACCESS_KEY=a/b+c=="], ["AWS_SECRET_ACCESS_KEY=***"]),
        (["-DdbPassword=S3"], ["-DdbPassword=***"]),
        (["wandb.api_key=S3", "lr=1"], ["wandb.api_key=***", "lr=1"]),
        (["postgres://u:S3@h:5/db"], ["postgres://u:***@h:5/db"]),
        (["--db=postgres://u:S3@h/db"], ["--db=postgres://u:***@h/db"]),
        (["https://h/x?a=1&token=S3&b=2"], ["https://h/x?a=1&token=***&b=2"]),
        (["-H", "Authorization: Bearer abcdefgh12"], ["-H", "Authorization: Bearer ***"]),
        (["-H", "Authorization: Basic abcdefgh12="], ["-H", "Authorization: Basic ***"]),
        (["X-Api-Key: S3"], ["X-Api-Key: ***"]),
        (['{"api_key": "S3", "n": 1}'], ['{"api_key": "***", "n": 1}']),
        (["sh", "-c", "run --token S3 --n 1"], ["sh", "-c", "run --token *** --n 1"]),
        (["engine --api-key S3 --port 1"], ["engine --api-key *** --port 1"]),
        (["AKIAIOSFODNN7EXAMPLE"], ["***"]),
        (["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"], ["***"]),
        (["x", "hf_abcdefghijklmnopqrst"], ["x", "***"]),
        (["sk-proj-abcdefghijklmnop1234"], ["***"]),
        (["ghp_abcdefghijklmnopqrstuvwxyz123456"], ["***"]),
        (["eyJhbGciOiJI.eyJzdWIiOiIx.abc-_"], ["***"]),
        (["-----BEGIN RSA PRIVATE KEY-----\nMIIE"], ["***"]),
    ],
)
def test_secrets_are_hidden(given, shown):
    assert procfs.redact(given) == tuple(shown)


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "meta-llama/Llama-3.1-8B-Instruct"],
        ["--max-tokens", "512", "--max-num-batched-tokens=8192"],
        ["--tokenizer", "mistralai/Mistral-7B", "--tokenizer-mode=auto"],
        ["--kv-cache-dtype", "fp8", "--port", "8000"],
        ["/home/User1/projects/training/configuration/x9.yaml", "lr=0.1"],
        ["http://localhost:8000/v1", "ssh://git@host/path", "file:///tmp/a:b@c"],
        ["0123456789abcdef0123456789abcdef01234567"],
        ["python", "-c", "import time; time.sleep(5)"],
        ["", "-", "--", "=", ":"],
        ["b\udcff\n"],
    ],
)
def test_what_is_no_secret_stays(argv):
    assert procfs.redact(argv) == tuple(argv)
