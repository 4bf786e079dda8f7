//! Signatures with minisign.

use std::fs;

use crate::harness::{copy, error_code, fails, fixture, json, run, same, shards, stderr, stdout};

/// A key with a password signs with the right password file only.
#[test]
fn key_with_a_password() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let write = |name: &str, text: &str| fs::write(home.path().join(name), text).unwrap();
    let keys = minisign::KeyPair::generate_encrypted_keypair(Some("two words".into())).unwrap();
    write("mine.key", &keys.sk.to_box(None).unwrap().to_string());
    write("mine.pub", &keys.pk.to_box().unwrap().into_string());
    write("right", "two words\nand a second line\n");
    write("wrong", "two word\n");
    write("empty", "");
    let sign = |password: &[&str], status: i32| {
        run(home.path(), &[&["compress", "model", "-o", "bundle", "--sign", "mine.key"], password].concat(), status)
    };
    for password in [&[][..], &["--password-file", "wrong"], &["--password-file", "empty"]] {
        let output = sign(password, 2);
        assert_eq!(error_code(&output), "signing-key-invalid");
        let message = stderr(&output);
        assert!(message.contains("mine.key") && message.contains("--password-file"), "{password:?}: {message}");
        assert!(!message.contains("two word") && !home.path().join("bundle").exists(), "{password:?}: {message}");
    }
    assert_eq!(error_code(&sign(&["--password-file", "nowhere"], 2)), "path-not-found");
    sign(&["--password-file", "right"], 0);
    run(home.path(), &["verify", "bundle", "--key", "mine.pub"], 0);
}

#[test]
fn verify_proves_the_signer() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for name in ["mine", "theirs"] {
        let keys = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
        fs::write(home.path().join(format!("{name}.key")), keys.sk.to_box(None).unwrap().to_string()).unwrap();
        fs::write(home.path().join(format!("{name}.pub")), keys.pk.to_box().unwrap().into_string()).unwrap();
    }
    run(home.path(), &["compress", "model", "-o", "bundle", "--sign", "mine.key"], 0);
    // A signature changes nothing else.
    run(home.path(), &["compress", "model", "-o", "plain", "--sha256"], 0);
    let signature = home.path().join("bundle/unweight.json.minisig");
    let text = fs::read_to_string(&signature).unwrap();
    fs::remove_file(&signature).unwrap();
    same(&home.path().join("bundle"), &home.path().join("plain"));
    fs::write(&signature, &text).unwrap();

    let verify = |bundle: &str, key: &str, status: i32| run(home.path(), &["verify", bundle, "--key", key], status);
    let output = verify("bundle", "mine.pub", 0);
    assert!(stdout(&output).contains("sound, and signed with this key"), "{}", stdout(&output));
    let public = fs::read_to_string(home.path().join("mine.pub")).unwrap();
    verify("bundle", public.lines().nth(1).unwrap(), 0);
    let report = json(&run(home.path(), &["verify", "bundle", "--key", "mine.pub", "--quick", "--json"], 0));
    assert_eq!(report["signature"], "unweight.json");
    // Commands without a key ignore the signature.
    assert!(json(&run(home.path(), &["verify", "bundle", "--json"], 0))["signature"].is_null());
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("model"), &home.path().join("restored"));
    let archive = run(home.path(), &["compress", "model", "-o", "-", "--sign", "mine.key"], 0).stdout;
    assert!(
        archive.windows(22).any(|window| window == b"\0unweight.json.minisig" || window == b"unweight.json.minisig\0")
    );

    let wrong = |bundle: &str, key: &str, code: &str, why: &str| {
        let report = json(&run(home.path(), &["verify", bundle, "--key", key, "--json"], 1));
        let problem = &report["problems"][0];
        assert_eq!(problem["code"], code, "{problem}");
        assert!(problem["message"].as_str().unwrap().contains(why), "{why}: {problem}");
    };
    wrong("bundle", "theirs.pub", "signature-invalid", "another key");
    let text_of = |output| stderr(&output);
    let printed = text_of(verify("bundle", "theirs.pub", 1));
    assert!(printed.contains("error[signature-invalid]") && printed.contains("check --key"), "{printed}");
    let message =
        fails(home.path(), &["compress", "model", "-o", "out", "--sign", "mine.pub"], 2, "signing-key-invalid");
    assert!(message.contains("mine.pub: a public key"), "{message}");
    wrong("plain", "mine.pub", "signature-invalid", "missing");
    // Another bundle with this signature, and this bundle with another signature.
    fs::write(home.path().join("plain/unweight.json.minisig"), &text).unwrap();
    verify("plain", "mine.pub", 0);
    run(home.path(), &["compress", "model", "-o", "plain", "--force", "--sha256", "--profile", "palette"], 0);
    fs::write(home.path().join("plain/unweight.json.minisig"), &text).unwrap();
    wrong("plain", "mine.pub", "signature-invalid", "does not match the manifest");
    fs::write(&signature, "untrusted comment: x\n").unwrap();
    wrong("bundle", "mine.pub", "signature-invalid", "not a minisign signature");
    // Verification still finds a flipped bit in the weights.
    fs::write(&signature, &text).unwrap();
    let shard = shards(&home.path().join("bundle"))[0].clone();
    let mut bytes = fs::read(&shard).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&shard, bytes).unwrap();
    wrong("bundle", "mine.pub", "bundle-content-mismatch", "expected");
    // A bundle whose digests can be forged is not accepted, even with a signature.
    copy(&fixture().join("bundle"), &home.path().join("weak"));
    let secret = fs::read_to_string(home.path().join("mine.key")).unwrap();
    let secret = minisign::SecretKeyBox::from_string(&secret).unwrap().into_unencrypted_secret_key().unwrap();
    let manifest = fs::read(home.path().join("weak/unweight.json")).unwrap();
    let by_hand = minisign::sign(None, &secret, &manifest[..], None, None).unwrap().to_string();
    fs::write(home.path().join("weak/unweight.json.minisig"), by_hand).unwrap();
    wrong("weak", "mine.pub", "signature-without-sha256", "no SHA-256");

    let mistakes: [(&[&str], &str); 5] = [
        (&["compress", "model", "-o", "out", "--sign", "nothing.key"], "path-not-found"),
        (&["compress", "model", "-o", "out", "--sign", "mine.pub"], "signing-key-invalid"),
        (
            &["compress", "model", "-o", "out", "--sign", "mine.key", "--password-file", "mine.pub"],
            "signing-key-invalid",
        ),
        (&["verify", "bundle", "--key", "/nowhere.pub"], "path-not-found"),
        (&["verify", "bundle", "--key", &"?".repeat(56)], "public-key-invalid"),
    ];
    for (arguments, code) in mistakes {
        fails(home.path(), arguments, 2, code);
        assert!(!home.path().join("out").exists());
    }
    fs::write(home.path().join("model/unweight.json.minisig"), "mine").unwrap();
    fails(home.path(), &["compress", "model", "-o", "out"], 2, "file-name-reserved");
}
