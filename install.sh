#!/bin/sh
# Installs the unweight command on Linux:
#
#     curl -fsSL https://unweight.example/unweight/install.sh | sh
#
# It fetches an archive of a release, checks its SHA-256 digest, and its signature where minisign is installed, and puts
# the command into ~/.local/bin. Nothing is installed unless every check passes. `--help` lists the options.
set -eu

# Set at publication. The layout is that of releases on GitHub.
releases=${UNWEIGHT_RELEASES:-https://unweight.example/unweight/releases}
# The second line of minisign.pub, set at publication.
public_key=${UNWEIGHT_PUBLIC_KEY:-}
# The oldest glibc that the command runs with.
glibc_major=2
glibc_minor=17
guide=https://unweight.example/unweight/blob/main/docs/guide/install.md
from_source="build from source: $guide"

usage() {
    cat <<'END'
Install the unweight command.

usage: install.sh [OPTIONS]

  --version VERSION    install this version, such as 0.1.0 (default: the latest)
  --to DIR             install into this directory (default: ~/.local/bin)
  --require-signature  fail if the signature cannot be checked (needs minisign)
  --uninstall          remove the command from --to
  --help               print this text

environment:
  UNWEIGHT_RELEASES    address of the releases
  UNWEIGHT_PUBLIC_KEY  minisign public key of the publisher
END
}

fail() {
    echo "error: $1" >&2
    [ $# -lt 2 ] || echo "help: $2" >&2
    exit 1
}

has() {
    command -v "$1" > /dev/null 2>&1
}

# Everything is in functions, and the last line calls one: a script that was cut off on its way does nothing.
main() {
    to='' version='' requires_signature='' uninstalls=''
    while [ $# -gt 0 ]; do
        case $1 in
            --version | --to)
                if [ $# -lt 2 ] || [ -z "$2" ]; then fail "$1 needs a value" "see --help"; fi
                if [ "$1" = --to ]; then to=$2; else version=${2#v}; fi
                shift
                ;;
            --require-signature) requires_signature=yes ;;
            --uninstall) uninstalls=yes ;;
            -h | --help) usage && exit 0 ;;
            *) fail "unexpected argument '$1'" "see --help" ;;
        esac
        shift
    done
    if [ -z "$to" ]; then
        [ -n "${HOME:-}" ] || fail "HOME is not set" "pass --to DIR"
        to=$HOME/.local/bin
    fi
    # Slashes and options have no place in a name of a file.
    case $version in
        *[!0-9A-Za-z.+-]* | -*) fail "'$version' is not a version" "pass one such as 0.1.0" ;;
    esac
    if [ -n "$uninstalls" ]; then uninstall; else install; fi
}

uninstall() {
    if [ ! -e "$to/unweight" ] && [ ! -L "$to/unweight" ]; then
        fail "$to/unweight does not exist" "pass --to DIR with the directory it was installed into"
    fi
    rm "$to/unweight" || fail "cannot remove $to/unweight" "check its permissions"
    echo "removed $to/unweight (compiled kernels remain in ~/.cache/unweight)"
}

install() {
    for tool in tar mktemp uname sed; do
        has "$tool" || fail "$tool is not installed" "install it and run this again"
    done
    detect
    elsewhere="pass --to DIR with a directory you can write to"
    mkdir -p "$to" || fail "cannot create $to" "$elsewhere"
    # Absolute and without a slash at its end, as in PATH.
    to=$(CDPATH='' cd -- "$to" && pwd) || fail "cannot enter $to" "$elsewhere"
    to=${to%/}
    [ ! -d "$to/unweight" ] || fail "$to/unweight is a directory" "remove it, or pass --to with another directory"
    # In the same directory, so that the last step is one rename.
    work=$(mktemp -d "$to/.unweight.XXXXXX") || fail "cannot write to $to" "$elsewhere"
    trap 'rm -rf "$work"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM

    sums_of_release
    # The static build has the commands that need no GPU. It is for Alpine and others with musl, and for machines that
    # have no other build.
    if ! listed "$(archive_for "$target")" && has_static; then
        target=$static
    elif ! listed "$(archive_for "$target")" && [ "$target" = "$static" ]; then
        [ -z "$lacks" ] || fail "$lacks" "$from_source"
        # gcompat runs programs for glibc.
        [ -e /lib/libgcompat.so.0 ] ||
            fail "release $version has no build for musl libc, which this system uses" \
                "install gcompat (apk add gcompat) and run this again, or build from source"
        target=${target%musl}gnu
    fi
    try
    # The shell's status for a program without its loader, as in systems that keep glibc elsewhere.
    if [ "$status" = 127 ] && [ "$target" != "$static" ] && has_static; then
        target=$static
        lacks="the build for glibc does not run here"
        try
    fi
    if [ "$status" = 126 ]; then
        # The shell's status for a file that it must not or cannot execute.
        case $said in
            *"xec format"*) fail "the command of $archive is not for this processor, $machine: $said" "$from_source" ;;
            *) fail "programs in $to must not run: $said" "pass --to DIR with a directory that is not mounted noexec" ;;
        esac
    fi
    [ "$status" = 0 ] || fail "the command of $archive does not run on this system: $said" "$from_source"
    if [ "$said" != "unweight $version" ]; then
        fail "the command of $archive says '$said', not 'unweight $version'" "report it"
    fi
    mv -f "$work/$name/unweight" "$to/unweight" || fail "cannot write $to/unweight" "$elsewhere"
    echo "installed unweight $version to $to/unweight"
    case $target in
        *musl) echo "this static build has the commands that need no GPU${lacks:+ ($lacks)}" ;;
    esac
    case ":${PATH:-}:" in
        *":$to:"* | *":$to/:"*)
            first=$(command -v unweight) || first=''
            case $first in
                "$to/unweight" | "$to//unweight" | '') ;;
                *) echo "warning: 'unweight' still runs $first, which is earlier on PATH; remove it" >&2 ;;
            esac
            ;;
        *) echo "$to is not on PATH; add it: export PATH=\"$to:\$PATH\"" ;;
    esac
}

# Unpacks the command for $target and runs it: only a command that runs here is installed.
try() {
    name=unweight-$version-$target
    archive=$(archive_for "$target")
    listed "$archive" || fail "release $version has no build for $target" "$from_source"
    if has zstd && listed "$name.tar.zst"; then
        archive=$name.tar.zst
    elif ! has gzip; then
        fail "gzip is not installed" "install it and run this again"
    fi
    fetch "$releases/download/v$version/$archive" "$work/$archive"
    check_digest
    unpack
    status=0
    said=$("$work/$name/unweight" --version 2>&1) || status=$?
}

archive_for() {
    echo "unweight-$version-$1.tar.gz"
}

has_static() {
    listed "$(archive_for "$static")"
}

# Sets $target to that of the build for this system, $static to that of the static build. Where only the static one
# can run, $lacks says why.
detect() {
    lacks=''
    system=$(uname -s) machine=$(uname -m)
    [ "$system" = Linux ] || fail "$system is not supported" "use Linux; see $guide"
    case $machine in
        x86_64 | amd64) machine=x86_64 ;;
        aarch64 | arm64) machine=aarch64 ;;
        *) fail "no build for $machine" "$from_source" ;;
    esac
    target=$machine-unknown-linux-gnu static=$machine-unknown-linux-musl
    # musl's getconf does not know this variable; some systems have no getconf, and texts of ldd differ.
    if libc=$(getconf GNU_LIBC_VERSION 2> /dev/null) && [ "${libc#glibc }" != "$libc" ]; then
        glibc=$(echo "$libc" | sed -n '1s/^glibc \([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p')
    else
        libc=$( (ldd --version) 2>&1 || true)
        case $libc in
            *musl*)
                target=$static
                return
                ;;
            "ldd ("*)
                glibc=$(echo "$libc" | sed -n '1s/.* \([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p')
                ;;
            *)
                target=$static
                for loader in /lib/ld-musl-*; do
                    [ ! -e "$loader" ] || return 0
                done
                lacks="cannot tell which C library this system has"
                return
                ;;
        esac
    fi
    if [ -z "$glibc" ] || [ "${glibc%%.*}" -lt "$glibc_major" ] || {
        [ "${glibc%%.*}" -eq "$glibc_major" ] && [ "${glibc#*.}" -lt "$glibc_minor" ]
    }; then
        target=$static
        lacks="glibc '$glibc' is too old; the command needs $glibc_major.$glibc_minor"
    fi
}

# Fetches and checks the digests of the release; finds out which version the latest is.
sums_of_release() {
    if [ -n "$version" ]; then base=$releases/download/v$version; else base=$releases/latest/download; fi
    fetch "$base/SHA256SUMS" "$work/SHA256SUMS"
    is_list || fail "$base/SHA256SUMS is damaged, or another page: it is not a list of digests" \
        "check the network, which may want you to log in, and UNWEIGHT_RELEASES; then run this again"
    check_signature "$base"
    # DIGEST  unweight-VERSION-ARCH-unknown-linux-LIBC.tar.gz
    pattern='^[0-9a-f]*  unweight-\([0-9][0-9A-Za-z.+-]*\)-[a-z0-9_]*-unknown-linux-[a-z]*\.tar\.gz$'
    found=$(sed -n "s/$pattern/\1/p" "$work/SHA256SUMS" | sed -n 1p)
    [ -n "$found" ] || fail "$base/SHA256SUMS lists no archive of unweight" "check UNWEIGHT_RELEASES"
    if [ -n "$version" ] && [ "$version" != "$found" ]; then
        fail "$base/SHA256SUMS is of version $found, not $version" "check UNWEIGHT_RELEASES"
    fi
    version=$found
}

# Whether SHA256SUMS has only lines of digests. What follows the last end of a line was cut.
is_list() {
    lines=''
    while read -r digest file; do
        case $digest in *[!0-9a-f]*) return 1 ;; esac
        [ "${#digest}" = 64 ] && [ -n "$file" ] || return 1
        lines=yes
    done < "$work/SHA256SUMS"
    [ -n "$lines" ] && [ -z "$digest" ]
}

# Whether the release has this file.
listed() {
    [ -n "$(digest_of "$1")" ]
}

# What SHA256SUMS says of a file.
digest_of() {
    while read -r digest file; do
        if [ "$file" = "$1" ]; then echo "$digest"; fi
    done < "$work/SHA256SUMS"
}

# The digests come from where the archive comes from: they find damage. Only a signature proves who made them.
check_signature() {
    # 42 bytes in base64.
    case $public_key in
        '' | RW??????????????????????????????????????????????????????) ;;
        *) fail "'$public_key' is not a public key" "set UNWEIGHT_PUBLIC_KEY to the second line of minisign.pub" ;;
    esac
    if [ -z "$public_key" ]; then
        why="no public key is known (UNWEIGHT_PUBLIC_KEY)"
    elif ! has minisign; then
        why="minisign is not installed"
    else
        fetch "$1/SHA256SUMS.minisig" "$work/SHA256SUMS.minisig"
        said=$(minisign -V -P "$public_key" -m "$work/SHA256SUMS" -x "$work/SHA256SUMS.minisig" 2>&1) ||
            fail "the signature of SHA256SUMS is not by $public_key: $said" "do not use these files; report them"
        echo "signature: by $public_key"
        return
    fi
    if [ -n "$requires_signature" ]; then
        fail "cannot check the signature: $why" "install minisign and set the key, or omit --require-signature"
    fi
    echo "signature: not checked, $why"
}

check_digest() {
    if has sha256sum; then
        got=$(sha256sum "$work/$archive")
    elif has shasum; then
        got=$(shasum -a 256 "$work/$archive")
    else
        fail "neither sha256sum nor shasum is installed" "install one of them and run this again"
    fi
    want=$(digest_of "$archive")
    if [ "${got%% *}" != "$want" ]; then
        fail "$archive has SHA-256 ${got%% *}, not $want" "it is damaged or was changed; run this again"
    fi
}

unpack() {
    case $archive in
        *.zst) zstd -dcq "$work/$archive" > "$work/tar" ;;
        *) gzip -dc "$work/$archive" > "$work/tar" ;;
    esac || fail "cannot decompress $archive" "check the space in $to"
    tar -xf "$work/tar" -C "$work" "$name/unweight" || fail "cannot unpack $archive" "check the space in $to"
}

# Fetches an address to a file. A server that sends nothing for 20 seconds gets one more chance.
fetch() {
    status=0
    echo "fetching $1"
    if has curl; then
        # What begins encrypted stays so.
        case $1 in https:*) only='=https' ;; *) only='=http,https' ;; esac
        curl -fsSL --proto "$only" --retry 1 --connect-timeout 10 --speed-time 20 -o "$2" "$1" || status=$?
        [ "$status" != 23 ] || fail "cannot write $2" "check the space in $to"
    elif has wget; then
        wget -q -t 2 -T 20 -O "$2" "$1" || status=$?
        # That of busybox in Debian 12 crashes if it is given a time.
        if [ "$status" = 139 ]; then
            status=0
            wget -q -O "$2" "$1" || status=$?
        fi
        [ "$status" != 3 ] || fail "cannot write $2" "check the space in $to"
    else
        fail "neither curl nor wget is installed" "install one of them and run this again"
    fi
    [ "$status" = 0 ] || fail "cannot fetch $1" "check the network, the version and UNWEIGHT_RELEASES"
}

main "$@"
