#!/usr/bin/env bash
# The whole job on this machine: sets up, deploys the profile local-cpu, and leaves the server running.
# Arguments go to `ddtoolkit deploy profile local-cpu`, such as --set service.port=30001.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bash "$here/scripts/setup.sh" engine
bin=${DDTOOLKIT_VENV:-$here/.venv}/bin
"$bin/ddtoolkit" deploy profile local-cpu "$@"
printf '\nThe command lies in %s; for this shell: export PATH="%s:$PATH"\n' "$bin" "$bin" >&2
