#!/bin/sh
# The page is tested in a real browser. As root on Debian it is installed; elsewhere this says how.
set -e
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
else
    echo "The page's tests need Chromium: install it (Debian: apt-get install chromium)," >&2
    echo "or set CLEARHEAD_NO_BROWSER=1 to leave those tests out." >&2
fi
