#!/usr/bin/env bash
# s3fs: an exception in the body of open() publishes what was written as the object.
# Expected: the upload in parts is aborted, and the object does not exist. Opening a path that a killed process wrote
#   goes on with its upload, or aborts it.
# Happens: the object is complete in the eyes of S3, and truncated. Of a killed process, the parts stay (and are paid
#   for), and a second upload begins beside the first.
# Versions: s3fs 2026.9.0, moto 5.2.5, Python 3.11; seen on 2026-11-28.
# Output seen:
#   s3fs 2026.9.0
#   after an exception: 5242980 bytes
#   uploads of a killed writer and of the next one: 2, and 1 after that one has ended
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" s3fs==2026.9.0 'moto[server]==5.2.5'
export PYTHONWARNINGS=ignore AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
"$folder/env/bin/python" - 2> "$folder/log" <<'PYTHON'
import os
from importlib.metadata import version

import s3fs
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f"http://127.0.0.1:{port}"
s3 = s3fs.S3FileSystem(endpoint_url=url, use_listings_cache=False)
s3.mkdir("bucket")
part = bytes(5 * 2**20)
try:
    with s3.open("bucket/exception", "wb", block_size=len(part)) as file:
        file.write(part + part[:100])
        raise ValueError
except ValueError:
    pass
print("s3fs", version("s3fs"))
size = s3.info("bucket/exception")["size"]
print(f"after an exception: {size} bytes")


def uploads():
    found = s3.call_s3("list_multipart_uploads", Bucket="bucket")
    return len(found.get("Uploads", ()))


killed = s3.open("bucket/killed", "wb", block_size=len(part))
other = s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True)
again = other.open("bucket/killed", "wb", block_size=len(part))
for file in (killed, again):
    for _ in range(3):
        file.write(part)
both = uploads()
again.close()
print(f"uploads of a killed writer and of the next one: {both}, and {uploads()} after that one has ended")
assert (size, both, uploads()) == (len(part) + 100, 2, 1), "changed"
os._exit(0)
PYTHON
