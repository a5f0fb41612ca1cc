#!/usr/bin/env bash
# Installs what the tests need from outside PyPI: a Chromium for the tests of the page. Does nothing where it is there.
# Where it cannot be installed, says which tests will not run; with REKINDLE_REQUIRE_ALL set that is an error.
set -u
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install="apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core"
    "$(dirname "$0")/step.sh" "Chromium, for the tests of the page" sh -c "$install || { apt-get update -q && $install; }" && exit 0
fi
echo "  No Chromium here: tests/e2e, the tests of the page, will be skipped. As root, with apt: make deps"
[ -z "${REKINDLE_REQUIRE_ALL:-}" ]
