//! Writes the source of variants, with the headers that they include, to a directory: `emit DIR [NAME_PART]`. The
//! default is all variants for Hopper.
//!
//! To compile one: `nvcc -arch=sm_90a -std=c++17 -I DIR/include -cubin DIR/<name>.cu`.

use std::{error::Error, fs, path::PathBuf};
use unweight_codegen::{
    render,
    spec::{Arch, catalog},
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("usage: emit DIR [NAME_PART]")?);
    let part = arguments.next().unwrap_or_else(|| Arch::Sm90a.tag().to_owned());
    fs::create_dir_all(&folder)?;
    let mut count = 0;
    let all = Arch::ALL.iter().flat_map(|arch| catalog::all(*arch));
    for spec in all.filter(|spec| spec.name().contains(&part)) {
        let source = render(&spec)?;
        fs::write(folder.join(format!("{}.cu", source.name)), &source.text)?;
        for (name, text) in source.headers {
            let path = folder.join("include").join(name);
            fs::create_dir_all(path.parent().ok_or("a header without a directory")?)?;
            fs::write(path, text)?;
        }
        count += 1;
    }
    println!("{count} variants in {}", folder.display());
    Ok(())
}
