# Sourced by the scripts in this folder: makes a virtual environment with the project in it.
#
# MHA_HAIKU_ENVIRONMENT is its folder; `.venv` in the repository if that is not set.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=${MHA_HAIKU_ENVIRONMENT:-$repository/.venv}

is_python_311() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

make_environment() {
  local python
  for python in python3.11 python3 python python3.12 python3.13 python3.14; do
    if is_python_311 "$python"; then
      echo "Making $environment with $("$python" --version)." >&2
      "$python" -m venv "$environment" && return
      rm -rf "$environment"
      echo "error: $python could not make a virtual environment in $environment." >&2
      exit 1
    fi
  done
  echo "error: Python 3.11 or newer is needed; there is no python3.11 or python3 like that." >&2
  exit 1
}

# Shows the lines of pip on stderr: on a terminal in one line, the next in place of the
# last; in a log only the names and sizes of what is fetched. Errors are on pip's stderr.
show_lines() {
  local line
  while IFS= read -r line; do
    if [ -t 2 ]; then
      printf '\r\033[K%.*s' "$((${COLUMNS:-80} - 1))" "$line" >&2
    elif [[ $line =~ ^\ *(Downloading|Building|Installing) ]]; then
      printf '%s\n' "$line" >&2
    fi
  done
  if [ -t 2 ]; then printf '\r\033[K' >&2; fi
}

# install EXTRAS: installs the project with these extras, once for each setup.cfg.
install() {
  [ -x "$environment/bin/python" ] || make_environment
  local stamp=$environment/.installed-${1//,/-}
  if ! cmp -s "$repository/setup.cfg" "$stamp"; then
    echo "Installing mha_haiku[$1] into $environment; this happens once." >&2
    "$environment/bin/python" -m pip install --progress-bar off --no-input \
      --disable-pip-version-check --editable "$repository[$1]" | show_lines
    cp "$repository/setup.cfg" "$stamp"
  fi
}
