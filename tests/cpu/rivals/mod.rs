//! The kernels of `unweight-rivals` in the simulator, compared with its decoders.

mod dfloat11;
mod matvans;
mod tans;
mod zipserv;

use unweight_codegen::{ExternalSource, lint, spec::Arch};
use unweight_rivals::cuda::{HEADERS, kernels};

const ARCH: Arch = Arch::Sm90a;

/// Returns (name, offset, bytes) of each field of a struct in the headers, with the layout of C++ on a 64-bit system.
fn device(name: &str) -> Vec<(String, usize, usize)> {
    let head = format!("struct {name} {{\n");
    let body = HEADERS.iter().find_map(|(_, text)| Some(text.split_once(&head)?.1)).expect("a header has the struct");
    let body = body.split_once("\n};").expect("the struct ends").0;
    let mut end = 0usize;
    let field = |line: &str| {
        let (kind, field) = line.trim().trim_end_matches(';').rsplit_once(' ').expect("a field has a type and a name");
        let bytes = match kind {
            pointer if pointer.ends_with('*') => 8,
            "u64" => 8,
            "u32" | "float" => 4,
            other => panic!("{name}.{field}: this test does not support type {other}"),
        };
        let offset = end.next_multiple_of(bytes);
        end = offset + bytes;
        (field.to_owned(), offset, bytes)
    };
    body.lines().map(field).collect()
}

#[test]
fn host_and_device_agree_on_every_field() {
    let kernels = kernels(ARCH);
    assert!(!kernels.is_empty());
    for ExternalSource { args, .. } in kernels {
        let host: Vec<_> = args.fields.iter().map(|field| (field.name.to_owned(), field.offset, field.bytes)).collect();
        assert_eq!(host, device(args.name), "{}", args.name);
    }
}

#[test]
fn kernels_fit_every_architecture_and_are_plain_text() {
    for arch in Arch::ALL {
        let mut names = std::collections::BTreeSet::new();
        for kernel in kernels(*arch) {
            let limits = arch.limits();
            assert!(kernel.smem.bytes() <= limits.smem_bytes_per_block, "{kernel}: {} B", kernel.smem.bytes());
            assert!(kernel.threads <= limits.threads_per_block && kernel.threads.is_multiple_of(32), "{kernel}");
            let source = kernel.render().unwrap_or_else(|error| panic!("{error}"));
            assert!(names.insert(source.name.clone()), "{kernel} is listed twice");
            let plain = source.text.replace("#include \"rivals/", "#include \"unweight/abi.cuh\" // ");
            assert_eq!(lint::kernel(&source.name, &plain), Ok(()));
        }
    }
    for (name, text) in HEADERS {
        let long = text.lines().position(|line| line.len() > 140);
        assert_eq!(long, None, "{name}: a long line");
    }
}
