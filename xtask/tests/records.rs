//! Checks that `docs/records/tables.inc` has the tables of the records. `UPDATE_DOCS=1 cargo test -p xtask --test
//! records` writes it.

use std::fs;

#[allow(dead_code, reason = "the task itself is not run")]
#[path = "../src/records.rs"]
mod records;
mod workspace;

use workspace::{read, root};

#[test]
fn tables_are_those_of_the_records() {
    let page = records::page(root()).unwrap();
    let path = root().join(records::PAGE);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    assert!(read(&path) == page, "{} is stale; run `cargo xtask records`", records::PAGE);
    // A row of a JSON file, and one of a CSV file with a quoted value.
    assert!(page.contains("<th>batch</th>") && page.contains("NVIDIA H200"));
    assert!(page.contains("<td>N(0, 0.02^2), 14336x4096</td><td>rans</td>"));
}
