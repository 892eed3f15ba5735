# Homebrew, from the newest source: `brew install --HEAD ./keepwarm.rb`. Not tried on a Mac.
# The release workflow puts the repository's address in place of REPOSITORY.
class Keepwarm < Formula
  desc "Local LLM agents that never compute the same prompt twice"
  homepage "https://REPOSITORY"
  license "Apache-2.0"
  head "https://REPOSITORY.git", branch: "main"

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  def install
    system "python3.13", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "install", "--disable-pip-version-check"]
    system(*pip, "--require-hashes", "--only-binary", ":all:", "--requirement", "requirements.lock")
    system(*pip, "--no-deps", "--no-build-isolation", ".")
    bin.install_symlink libexec/"bin/keepwarm"
  end

  service do
    run [opt_bin/"keepwarm", "serve"]
    keep_alive crashed: true
    error_log_path var/"log/keepwarm.log"
  end

  test do
    assert_match "keepwarm", shell_output("#{bin}/keepwarm doctor --json")
  end
end
